"""Retrieval-augmented speculative decoding: the method, its engines and an in-process API."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rapid.config import PromptLookup, SamplingConfig, SpeculationConfig, WindowDrafting
    from rapid.generation import Generation, generate, load
    from rapid.messages import Document, Message
    from rapid.pair import Answer, Pair
    from rapid.pair import open_pair as open

__all__ = [
    "Answer",
    "Document",
    "Generation",
    "Message",
    "Pair",
    "PromptLookup",
    "SamplingConfig",
    "SpeculationConfig",
    "WindowDrafting",
    "generate",
    "load",
    "open",
]

_HOMES = {
    "Answer": ("rapid.pair", "Answer"),
    "Document": ("rapid.messages", "Document"),
    "Generation": ("rapid.generation", "Generation"),
    "Message": ("rapid.messages", "Message"),
    "Pair": ("rapid.pair", "Pair"),
    "PromptLookup": ("rapid.config", "PromptLookup"),
    "SamplingConfig": ("rapid.config", "SamplingConfig"),
    "SpeculationConfig": ("rapid.config", "SpeculationConfig"),
    "WindowDrafting": ("rapid.config", "WindowDrafting"),
    "generate": ("rapid.generation", "generate"),
    "load": ("rapid.generation", "load"),
    "open": ("rapid.pair", "open_pair"),
}


def __getattr__(name: str) -> Any:
    """Import a public name on first access, so that `import rapid` does not load torch."""
    if name in _HOMES:
        module, attribute = _HOMES[name]
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module 'rapid' has no attribute {name!r}")
