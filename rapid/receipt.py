"""The receipt of an answer: its contract, with every resolved setting, counters and timings."""

from __future__ import annotations

import datetime
import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # `benchmarks/gpu.py` runs without pydantic
    from rapid.config import Contract, Coupling, KVCacheDtype, Mode

Origin = Literal["drafted", "corrected", "bonus", "target"]
Writer = Literal["drafted", "corrected", "bonus", "target", "drafter"]
Failover = Literal[
    "orchestrator lost", "target lost", "target hung", "drafter lost", "drafter hung"
]
CutBy = Literal["grammar too complex"]
EvidenceKind = Literal["copied", "needed", "present"]
Cause = Literal[  # of a mode; metrics have it as a label, so it never holds a number or a name
    "asked for",
    "evidence found",
    "evidence too weak",
    "drafter can answer",
    "drafter cannot answer",
    "prompt lookup",
    "KV window",
    "nothing to retrieve from",
    "nothing above the floor",
    "nothing fits the budget",
    "still indexing",
    "retrieval lost",
    "drafter's prompt too long",
    "target's prompt too long",
    "no drafter",
    "drafter lost",
]

MOST_EXPLAINED = 1000  # tokens of an answer that are explained one by one: some 150 KB of JSON


@dataclass(frozen=True, slots=True)
class ChunkUsed:
    """A retrieved chunk in the receipt; `start` and `end` are character offsets in the document."""

    id: str
    document: str
    score: float
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ReadPart:
    """A part of a document, in character offsets, [start, end)."""

    document: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Citation:
    """Where a part of an answer is from; all places are character offsets, [start, end).

    Attributes:
        evidence: `copied`: it stands there word for word. `needed`: without that passage the
            drafter finds the statement less likely. `present`: the passage has most of its words.
        passage_id: The retrieved passage; None if that part of the document was not retrieved.
        quote: The document's words there.
        fall: Nats by which the statement is less likely without the passage, if it is `needed`.
    """

    choice: int
    start: int
    end: int
    evidence: EvidenceKind
    document: str
    passage_id: str | None
    document_start: int
    document_end: int
    quote: str
    fall: float | None = None


@dataclass(frozen=True, slots=True)
class Citations:
    """Citations of a request's answers, with choice, start and end of the statements without any.

    `needed` says whether falls were measured, or why not.
    """

    found: tuple[Citation, ...]
    unsupported: tuple[tuple[int, int, int], ...]
    needed: str


@dataclass(frozen=True, slots=True)
class TokenProbs:
    """Probabilities of a committed token before the request's filters; None if not computed.

    Attributes:
        target: p, the target's.
        drafter: q, that of the proposal which its position was drafted from; None if that was the
            text itself.
        sampled: That of the distribution which the answer follows: p_hat, or p of a token that was
            not drafted. Under the rule `paper`, the p_hat that the drafted token was judged by.
    """

    target: float | None = None
    drafter: float | None = None
    sampled: float | None = None


@dataclass(frozen=True, slots=True)
class ExplainedToken:
    """One token of an answer: who wrote it, how likely it was, and where its words stand.

    Attributes:
        text: What the token added to the text of the answer, or of the thinking before it. It is
            empty while a character or a stop string is incomplete; the token that decides has all.
        writer: Its origin; `drafter` in mode `rag`, where the drafter answers alone.
        passage: Id of the retrieved passage in which the words around it stand, or None.
        is_thinking: Whether `text` is of the thinking.
    """

    text: str
    writer: Writer
    target: float | None = None
    drafter: float | None = None
    sampled: float | None = None
    passage: str | None = None
    is_thinking: bool = False


@dataclass(frozen=True, slots=True)
class PassagesRead:
    """How a drafter read the passages of its prompt.

    Attributes:
        reading: `apart`: each by itself. `together`: as any text; `reason` says why.
        reused_tokens: Those of passages that were read for earlier prompts.
    """

    reading: Literal["apart", "together"]
    reused_tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The token ids from which an answer can be recomputed offline, one tuple per choice.

    Attributes:
        tokens: The first `MOST_EXPLAINED` tokens of each choice.
        truncated: Whether a choice has more.
    """

    target_prompt_ids: tuple[int, ...]
    drafter_prompt_ids: tuple[int, ...]
    witness_prompt_ids: tuple[int, ...]
    token_ids: tuple[tuple[int, ...], ...]
    origins: tuple[tuple[Origin, ...], ...]
    tokens: tuple[tuple[ExplainedToken, ...], ...] = ()
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class ChoiceStatistics:
    """Counters over the rounds of one choice.

    Attributes:
        histogram: Drafted rounds by block length: entry i counts those that accepted exactly i
            tokens.
        refreshes: Number of times that the drafter's context was retrieved again.
        forced: Drafted tokens that were the only ones a grammar allows, and cost no forward.
        thinking_tokens: Those before the answer, with their marks.
        cut_by: What ended it with the reason `length` before its length; None if nothing did.
    """

    rounds: int
    drafted: int
    accepted: int
    corrected: int
    bonus: int
    completion_tokens: int
    histogram: dict[int, tuple[int, ...]]
    refreshes: int = 0
    forced: int = 0
    thinking_tokens: int = 0
    cut_by: CutBy | None = None

    @property
    def drafted_rounds(self) -> int:
        """The number of rounds with a draft; in the others the target decoded alone."""
        return sum(map(sum, self.histogram.values()))


@dataclass(frozen=True, slots=True)
class Receipt:
    """The contract under which an answer was produced, with every resolved setting.

    Attributes:
        reason: Why it is this mode, in a sentence.
        cause: The same as one of few words.
        witness_tokens: Length of the retrieved text that the target read beside its own prompt,
            for `adaptive`; 0 if it did not.
        kv_cache_dtype: That of the engines that keep KV in eight bits, by role.
        timings_ms: Milliseconds by phase: queue, retrieval, target_prefill, drafter_prefill,
            witness_prefill (where there is a witness), draft and verify.
        plain_from: Per choice, the position from which the drafter was lost, or None.
        failovers: Failures after which the answer was continued, in order.
        is_fallback: Whether the mode did not get the drafter or the retrieved text that it needs;
            `reason` says which.
        citations: Where the answers are from, if that was asked for.
        target_s: Seconds that the answer took of the steps of the target's engine, for the ledger;
            `drafter_s` of the drafter's, refused drafts included. What earlier answers of the
            tenant took untold is in it.
        kv_byte_s: Bytes of KV by the seconds for which it held them, on all engines.
        left_out: Places in the chat of the messages that the target did not read, as it was too
            long for its context and was to be shortened.
        sections: What the target read of documents that do not fit its context; empty if it read
            all.
        places: File, pages and lines of passages of stored documents, by document, start and end.
        application: Name of the application that answered, where there are two beside each other.
        ignored: Names of the request's fields that changed nothing.
        joined_query: What was searched for, if it is the question with those before it.
        passages: How the drafter read them, where it may read each by itself; else None.
    """

    mode: Mode
    reason: str
    cause: Cause
    contract: Contract
    seed: int
    date: datetime.date
    coupling: Coupling
    transfer: str
    eta: float
    max_draft: int
    plausibility: float
    draft_top_k: int | None
    transfer_temperature: float
    prompt_tokens: int
    cached_tokens: int
    choices: tuple[ChoiceStatistics, ...]
    chunks: tuple[ChunkUsed, ...]
    timings_ms: dict[str, float]
    plain_from: tuple[int | None, ...] = ()
    failovers: tuple[Failover, ...] = ()
    is_fallback: bool = False
    witness_tokens: int = 0
    kv_cache_dtype: dict[str, KVCacheDtype] = field(default_factory=dict)
    explanation: Explanation | None = None
    citations: Citations | None = None
    target_s: float = 0.0
    drafter_s: float = 0.0
    kv_byte_s: float = 0.0
    left_out: tuple[int, ...] = ()
    sections: tuple[ReadPart, ...] = ()
    places: Mapping[tuple[str, int, int], Mapping[str, Any]] = field(default_factory=dict)
    application: str | None = None
    ignored: tuple[str, ...] = ()
    joined_query: str | None = None
    passages: PassagesRead | None = None

    def __str__(self) -> str:
        """Return the receipt in a few lines; `repr` has all of it."""
        return "\n".join(f"{name:<9} {value}" for name, value in self._summary().items())

    def _repr_html_(self) -> str:
        """Return the same as a table, which notebooks show."""
        rows = "".join(
            f"<tr><th>{name}</th><td>{html.escape(value)}</td></tr>"
            for name, value in self._summary().items()
        )
        return f"<table>{rows}</table>"

    def _summary(self) -> dict[str, str]:
        drafted, accepted = (
            sum(getattr(each, name) for each in self.choices) for name in ("drafted", "accepted")
        )
        written = sum(each.completion_tokens for each in self.choices)
        names = list(dict.fromkeys(chunk.document for chunk in self.chunks))
        return {
            "mode": f"{self.mode} ({self.reason})",
            "contract": self.contract,
            "settings": f"seed {self.seed}, transfer {self.transfer}, eta {self.eta:g}",
            "drafts": f"{accepted} of {drafted} tokens kept",
            "tokens": f"{self.prompt_tokens:,} read ({self.cached_tokens:,} of them before), "
            f"{written:,} written",
            "passages": f"{len(self.chunks)} from {', '.join(names)}" if names else "none",
            "times, ms": ", ".join(f"{name} {ms:.0f}" for name, ms in self.timings_ms.items()),
        }
