"""Retrieval-augmented speculative decoding: the method, the engines, and their use in process."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rapid.config import PromptLookup, WindowDrafting
    from rapid.generation import Generation, generate, load

__all__ = ["Generation", "PromptLookup", "WindowDrafting", "generate", "load"]


def __getattr__(name: str) -> Any:
    """Import torch and transformers only for those who use them."""
    if name in __all__:
        from rapid import generation

        return getattr(generation, name)
    raise AttributeError(f"module 'rapid' has no attribute {name!r}")
