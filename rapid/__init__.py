"""Retrieval-augmented speculative decoding: the method, its engines and an in-process API."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rapid.chat_messages import Document, Message
    from rapid.config import PromptLookup, SamplingConfig, SpeculationConfig, WindowDrafting
    from rapid.events import Reading
    from rapid.generation import Generation, generate, load
    from rapid.pair.pair import Pair
    from rapid.pair.pair_opening import open_pair as open
    from rapid.pair.pair_stream import Answer
    from rapid.transfers import register_transfer

__all__ = [
    "Answer",
    "Document",
    "Generation",
    "Message",
    "Pair",
    "PromptLookup",
    "Reading",
    "SamplingConfig",
    "SpeculationConfig",
    "WindowDrafting",
    "generate",
    "load",
    "open",
    "register_transfer",
]

_NAMES_OF = {
    "rapid.config": ("PromptLookup", "SamplingConfig", "SpeculationConfig", "WindowDrafting"),
    "rapid.events": ("Reading",),
    "rapid.generation": ("Generation", "generate", "load"),
    "rapid.chat_messages": ("Document", "Message"),
    "rapid.pair.pair_stream": ("Answer",),
    "rapid.pair.pair": ("Pair",),
    "rapid.pair.pair_opening": ("open",),
    "rapid.transfers": ("register_transfer",),
}


def __getattr__(name: str) -> Any:
    """Import a public name on first access, so that `import rapid` does not load torch."""
    for module, names in _NAMES_OF.items():
        if name in names:
            return getattr(import_module(module), "open_pair" if name == "open" else name)
    raise AttributeError(f"module 'rapid' has no attribute {name!r}")
