"""The choice of a request's mode and contract, by what retrieval found.

Evidence chooses the contract: `auto` is `fused` when what retrieval found has enough to do with the
question, and the drafter, where it is asked, says that it answers it; else the target's own
distribution. So an `auto` request with a seed gives the same answer
on an idle and on a busy system, as long as both have a drafter for it.

What a mode needs and does not get is dealt with by one rule:

* **No drafter** (none within `drafter_wait_s`, none alive, or lost before the first token) **or no
  retrieval** (it does not answer, or is still indexing): `auto` is answered as `plain`, and
  `lossless` is drafted from the target's own text, where it may be (`Run.drafts_from_text`), else
  `plain` too; the receipt says so (`is_fallback`). Explicit `fused`, `paper` and `rag` are refused.
* **Retrieval that finds nothing** is an answer: `fused` and `paper` sample the target, `rag`
  answers without documents, and the receipt says so (`is_fallback`). `auto` is `plain`, as its
  evidence has it, and `lossless` drafts from the question.
* **`rag` without any text to search** is refused as a mistake of the caller's.

When a drafter is lost later, the target goes on without it, in `lossless` with drafts from the
text; ``plain_from`` is the first such token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never, get_args

from rapid.config import Contract, Mode, OwnDrafting
from rapid.errors import BadRequest, RetrievalUnavailable
from rapid.receipt import Cause

FUSING: tuple[Mode, ...] = ("fused", "paper")  # modes that need a drafter when set explicitly

_SENTENCES: dict[Cause, str] = {
    "asked for": "asked for",
    "evidence found": "retrieval found evidence",
    "evidence too weak": "the retrieved passages are not about the question",
    "drafter can answer": "the drafter finds the answer in what was retrieved",
    "drafter cannot answer": "the drafter does not find the answer in what was retrieved",
    "nothing to retrieve from": "there is nothing to retrieve from",
    "nothing above the floor": "retrieval found nothing above its floor",
    "nothing fits the budget": "no retrieved chunk fits the budget",
    "still indexing": "the documents were still being indexed for retrieval; ask again later",
    "retrieval lost": "retrieval did not answer",
    "drafter's prompt too long": "what the drafter would read does not fit",
    "target's prompt too long": "the documents do not fit the target",
    "no drafter": "no drafter could be had",
    "drafter lost": "the drafter was lost before the first token",
    **{own.name: f"{own.name} drafts: nothing to fuse with" for own in get_args(OwnDrafting)},
}
SAYS_NOTHING = tuple(
    _SENTENCES[cause]
    for cause in ("nothing above the floor", "evidence too weak", "drafter cannot answer")
)
"""Parts of reasons which say that the documents are not about the question."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The outcome of retrieval, as far as the mode depends on it.

    Attributes:
        num_chunks: Number of retrieved chunks that the drafter will read.
        cause: What came of retrieval, in few words.
        is_enough: Whether these chunks have enough to do with the question for `auto` to rely on.
    """

    num_chunks: int
    cause: Cause = "evidence found"
    is_enough: bool = True

    @property
    def is_lost(self) -> bool:
        """Whether retrieval failed."""
        return self.cause in ("retrieval lost", "still indexing")

    @property
    def has_text(self) -> bool:
        """Whether there was any text to search."""
        return self.cause != "nothing to retrieve from"

    @property
    def why_none(self) -> str:
        """Explanation for the caller when there are no chunks."""
        return _SENTENCES[self.cause]


@dataclass(frozen=True, slots=True)
class Decision:
    """The resolved mode with its cause and contract.

    Attributes:
        cause: Why it is this mode, for metrics: one of few.
        is_drafted: Whether the answer is drafted.
        is_fallback: Whether the mode did not get the drafter or the retrieved text that it needs.
        detail: What the receipt says of this request after the sentence of the cause.
    """

    mode: Mode
    cause: Cause
    contract: Contract
    is_drafted: bool
    is_fallback: bool = False
    detail: str = ""

    @property
    def reason(self) -> str:
        """Why it is this mode, in a sentence for the receipt."""
        return _SENTENCES[self.cause] + self.detail


def decide(asked: Mode, evidence: Evidence, *, by_text: bool = False) -> Decision:
    """Choose the mode from the requested one and the outcome of retrieval.

    `by_text` tells whether the text itself may draft.

    Raises:
        RetrievalUnavailable: Retrieval failed, and the mode is explicit and needs it.
        BadRequest: The mode is `rag`, and there is no text to search.
    """
    if asked == "plain":
        return Decision("plain", "asked for", "target", is_drafted=False)
    if evidence.is_lost and (asked in FUSING or asked == "rag"):
        raise RetrievalUnavailable(
            f"Mode {asked!r} needs what retrieval finds: {evidence.why_none}. Ask again, or use "
            "mode 'auto', which goes on without."
        )
    if asked == "rag":
        if not evidence.has_text:
            raise BadRequest(
                "rapid.mode 'rag' answers from what retrieval finds in documents, and there are "
                "none: attach some, or use 'plain'",
                "rapid.mode",
                "invalid_value",
            )
        detail, is_fallback = _reserve(evidence), not evidence.num_chunks
        if is_fallback:
            detail = f", but {evidence.why_none}: the drafter answered without documents"
        return Decision("rag", "asked for", "drafter", False, is_fallback, detail)
    if evidence.is_lost:
        return without_drafter(evidence.cause, by_text=by_text)
    if asked == "lossless":
        detail = _reserve(evidence)
        return Decision("lossless", "asked for", "target", is_drafted=True, detail=detail)
    if asked == "fused" or asked == "paper":
        if not evidence.num_chunks:
            detail = f", but {evidence.why_none}: nothing to fuse with"
            return Decision(asked, "asked for", "target", False, is_fallback=True, detail=detail)
        return Decision(asked, "asked for", asked, is_drafted=True, detail=_reserve(evidence))
    if asked == "auto":
        if not evidence.num_chunks:
            return Decision("plain", evidence.cause, "target", is_drafted=False)
        if not evidence.is_enough:
            return Decision("plain", "evidence too weak", "target", is_drafted=False)
        return Decision("fused", "evidence found", "fused", is_drafted=True)
    assert_never(asked)


def _reserve(evidence: Evidence) -> str:
    """Return what the reason of an explicit mode adds if the documents are about other things."""
    cause: Cause = evidence.cause if evidence.is_enough else "evidence too weak"
    is_weak = cause in ("evidence too weak", "nothing above the floor")
    return f", though {_SENTENCES[cause]}" if is_weak else ""


def decide_by_reading(log_odds: float, least: float) -> Decision:
    """Choose the mode of an `auto` request whose drafter was asked whether it can answer.

    Args:
        log_odds: What the drafter said, yes against no.
        least: The least that `auto` relies on.
    """
    detail = f" ({log_odds:+.2f})"
    if log_odds < least:
        cause: Cause = "drafter cannot answer"
        return Decision("plain", cause, "target", is_drafted=False, detail=detail)
    return Decision("fused", "drafter can answer", "fused", is_drafted=True, detail=detail)


def decide_without_reader(asked: Mode, drafting: OwnDrafting) -> Decision:
    """Choose the mode of a request to be drafted from nothing but the target's own prompt.

    Raises:
        BadRequest: The mode needs a drafter that reads retrieved text.
    """
    if asked not in ("auto", "lossless"):
        raise BadRequest(
            f"rapid.mode {asked!r} needs a drafter that reads what retrieval finds, and this "
            f"server drafts by {drafting.name}: use 'lossless' or 'plain', or configure `drafter` "
            "with an engine, or as `target`",
            "rapid.mode",
            "invalid_value",
        )
    if asked == "auto":
        return Decision("lossless", drafting.name, "target", is_drafted=True)
    detail = f", drafted by {drafting.name}"
    return Decision("lossless", "asked for", "target", is_drafted=True, detail=detail)


def without_drafter(cause: Cause, *, at_start: bool = True, by_text: bool = False) -> Decision:
    """Return the decision for `auto` and `lossless` when no drafter is available.

    Args:
        cause: Why there is none.
        at_start: Whether that was known when the answer began, and no draft was expected of one.
        by_text: Whether the text itself may draft, as in `lossless`.
    """
    mode: Mode = "lossless" if by_text else "plain"
    detail = f": the target went on {'with drafts from its own text' if by_text else 'alone'}"
    return Decision(mode, cause, "target", not at_start, is_fallback=True, detail=detail)
