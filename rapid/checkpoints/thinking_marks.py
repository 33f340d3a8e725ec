"""The marks between which models think before they answer, found by what their templates write.

Sources: the chat templates of Qwen 3, QwQ and DeepSeek R1's distilled models (``<think>``), of
Magistral (``[THINK]``), of Seed-OSS (``<seed:think>``), of Granite 3.2 and of gpt-oss.
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


@dataclass(frozen=True, slots=True)
class SpokenMarks:
    """The texts, of several tokens each, that open and close an answer's thinking.

    They can be read, and not made to come: who speaks them may spell them in many ways.

    Attributes:
        of_answers: Those with which an answer begins that was not thought about, or behind the
            closing one.
    """

    opening: str
    closing: str
    of_answers: tuple[str, ...] = ()


GRANITE = SpokenMarks("Here is my thought process:", "Here is my response:")
# The channels of gpt-oss; what it says in the third one to tools is the answer's.
HARMONY = SpokenMarks(
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant",
    ("<|channel|>final<|message|>", "<|channel|>commentary<|message|>"),
)


def find_marks(template: str, added: Mapping[int, str]) -> ThinkingMarks | SpokenMarks | None:
    """Return the marks of a chat template's models; None if they do not think apart.

    Args:
        template: The chat template.
        added: Texts of the vocabulary's added tokens, by id; a mark that is one of them is taken
            first, as only of such it is known where thinking ends, and it can be made to.
    """
    ids = {text: id_ for id_, text in added.items()}
    for opening, closing in _KNOWN:
        is_written = opening in template or closing in template
        if is_written and opening in ids and closing in ids:
            return ThinkingMarks(ids[opening], ids[closing])
    if GRANITE.opening in template and GRANITE.closing in template:
        return GRANITE
    is_harmony = HARMONY.opening in template and HARMONY.of_answers[0] in template
    return HARMONY if is_harmony and "<|channel|>" in ids else None
