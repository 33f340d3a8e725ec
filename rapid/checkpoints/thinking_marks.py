"""The marks between which models think before they answer, found by what their templates write.

Sources: the chat templates of Qwen 3, QwQ and DeepSeek R1's distilled models (``<think>``), of
Magistral (``[THINK]``) and of Seed-OSS (``<seed:think>``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_KNOWN = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
)


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The tokens that open and close an answer's thinking."""

    opening: int
    closing: int


def find_marks(template: str, added: Mapping[int, str]) -> ThinkingMarks | None:
    """Return the marks of a chat template's models; None if they do not think apart.

    Args:
        template: The chat template.
        added: Texts of the vocabulary's added tokens, by id; a mark has to be one of them, as only
            then it is known where thinking ends, and can be made to.
    """
    ids = {text: id_ for id_, text in added.items()}
    for opening, closing in _KNOWN:
        is_written = opening in template or closing in template
        if is_written and opening in ids and closing in ids:
            return ThinkingMarks(ids[opening], ids[closing])
    return None
