"""What crosses a boundary, in the order of a request's life. Learn the system from this file.

Arrays are numpy, never torch: Ray maps numpy read-only out of shared memory without a copy.
Positions are 0-based generated positions: the first answer token of a choice has position 0.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # `benchmarks/gpu.py` runs where pydantic is not
    from rapid.config import Contract, Coupling, Mode, SamplingConfig, SpeculationConfig, Transfer

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
Origin = Literal["drafted", "corrected", "bonus", "target"]
FinishReason = Literal["stop", "length"]
Failover = Literal["target lost", "drafter lost", "drafter hung"]


# --- caller -> orchestrator ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of the chat; ``role`` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Document:
    """A text attached to the request."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class SpeculationRequest:
    """What the caller asked of the method; None leaves it to the configured default."""

    mode: Mode = "auto"
    transfer: Transfer | None = None
    eta: float | None = None
    max_draft: int | None = None
    coupling: Coupling | None = None
    plausibility: float | None = None
    draft_top_k: int | None = None
    all_draft_tokens: bool = False  # `draft_top_k: null` was sent: no cut
    refresh: bool = False  # retrieve again, for the answer so far, after rejected drafts


def utc_day() -> datetime.date:
    """Return today's date in UTC."""
    return datetime.datetime.now(datetime.UTC).date()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A validated request with its tenant, as the ingress hands it to the orchestrator.

    Attributes:
        date: the day that a chat template may name in its prompts; the day the request came, unless
            the caller names another. It is settled once, for all prompts of the request.
    """

    request_id: str
    tenant: str
    messages: tuple[Message, ...]
    documents: tuple[Document, ...] = ()
    query: str | None = None
    retrieval_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    num_choices: int = 1
    stop: tuple[str, ...] = ()
    num_logprobs: int | None = None  # None: no logprobs; 0: the chosen token's only
    is_streamed: bool = False  # somebody reads along
    speculation: SpeculationRequest = field(default_factory=SpeculationRequest)
    explain: bool = False
    date: datetime.date = field(default_factory=utc_day)


# --- orchestrator -> engine ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """Room for one request on one engine: all choices share the prompt's KV.

    Attributes:
        prompt_ids: the prompt, one row of token ids.
        num_choices: answers wanted of it.
        max_tokens: longest answer; pages for it are reserved at once, so nothing is preempted.
        num_logprobs: None for none, else how many alternatives beside the committed token.
        committed: per choice, tokens already generated elsewhere (it replaces a failed lease).
        companion_tokens: with an engine that drafts for itself, about how long the drafter's prompt
            will be; room for a second lease of this request is kept. 0: there will be none.
        beside: the request's first lease on this engine, which keeps room for this one.
        affinity: name of what the prompt is about; a pool leases where the same was read before.
    """

    lease_id: str
    tenant: str
    prompt_ids: Int32Array
    max_tokens: int
    sampling: SamplingConfig
    speculation: SpeculationConfig
    num_choices: int = 1
    num_logprobs: int | None = None
    committed: tuple[tuple[int, ...], ...] = ()
    companion_tokens: int = 0
    beside: str | None = None
    affinity: str = ""


@dataclass(frozen=True, slots=True)
class PrefillReceipt:
    """The prompt's KV is in place."""

    lease_id: str
    num_tokens: int
    num_cached_tokens: int


# --- drafter -> target --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """Up to `max_draft` tokens, each with the exact distribution it was drawn from.

    Row i holds the proposal at generated position ``position + i``: ``candidate_probs[i]`` sums to
    one over ``candidate_ids[i]``; tokens not listed have probability zero. Rows are padded with id
    -1 and probability 0 when fewer candidates survive the filters.

    Attributes:
        token_ids: drafted tokens [k].
        candidate_ids: tokens of each proposal [k, m].
        candidate_probs: their probabilities, float32 [k, m].
    """

    lease_id: str
    choice: int
    position: int
    token_ids: Int32Array
    candidate_ids: Int32Array
    candidate_probs: Float32Array
    draft_ms: float = 0.0

    def __len__(self) -> int:
        return len(self.token_ids)


# --- target -> loop (and, by the loop, -> drafter) ----------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of a committed token and of the best alternatives, before filters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one round committed: accepted draft tokens and, after a rejection, the corrected one.

    Under the rule `exact` a block has no bonus token, so ``len(token_ids)`` is at most the block's
    length; `paper` adds one to a block that was accepted whole. An end-of-sequence token is the
    last of ``token_ids`` and sets ``is_finished``; nothing follows it.

    Attributes:
        token_ids: committed this round.
        num_drafted: drafted tokens that were judged; 0 for plain decoding.
        num_accepted: leading tokens of ``token_ids`` that the drafter proposed.
    """

    lease_id: str
    choice: int
    position: int
    token_ids: tuple[int, ...]
    num_drafted: int
    num_accepted: int
    is_finished: bool
    logprobs: tuple[TokenLogprobs, ...] = ()
    draft_ms: float = 0.0
    verify_ms: float = 0.0

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Where each committed token came from."""
        rest: Origin = "corrected" if self.num_drafted else "target"
        if self.num_drafted and self.num_accepted == self.num_drafted:
            rest = "bonus"
        origins: list[Origin] = ["drafted"] * self.num_accepted
        return (*origins, *([rest] * (len(self.token_ids) - self.num_accepted)))


@dataclass(frozen=True, slots=True)
class TargetLogits:
    """The target's logits of a block, for judging elsewhere: float32 [rows, vocab]."""

    lease_id: str
    choice: int
    position: int
    logits: Float32Array
    verify_ms: float = 0.0


# --- engine -> whoever asks ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The engine's ledger: pages in use plus free is the total, leases open are sequences held.

    Attributes:
        ahead_hits: calls for a block that found some of it drafted ahead.
        ahead_misses: those that found what was drafted ahead to be wrong.
    """

    leases_open: int
    max_leases: int
    kv_pages_in_use: int
    kv_pages_total: int
    page_tokens: int
    max_context: int
    ahead_hits: int = 0
    ahead_misses: int = 0


# --- orchestrator -> ingress --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChunkUsed:
    """A retrieved chunk as the receipt names it; offsets are characters of the document."""

    id: str
    document: str
    score: float
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """Enough to recompute the answer offline, one list per choice."""

    target_prompt_ids: tuple[int, ...]
    drafter_prompt_ids: tuple[int, ...]
    token_ids: tuple[tuple[int, ...], ...]
    origins: tuple[tuple[Origin, ...], ...]


@dataclass(frozen=True, slots=True)
class Started:
    """Leases are held and the modes resolved: the response may start."""

    mode: Mode
    reason: str
    contract: Contract


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token as text, for logprobs."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one choice: at most one per round; the last carries the finish reason."""

    choice: int
    text: str
    logprobs: tuple[TokenText, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class ChoiceStatistics:
    """Counters of one choice's rounds.

    Attributes:
        histogram: of drafted rounds: by block length, [i] counts those that accepted exactly i.
    """

    rounds: int
    drafted: int
    accepted: int
    corrected: int
    bonus: int
    completion_tokens: int
    histogram: dict[int, tuple[int, ...]]
    refreshes: int = 0

    @property
    def drafted_rounds(self) -> int:
        """Rounds in which something was drafted; the others the target decoded alone."""
        return sum(map(sum, self.histogram.values()))


@dataclass(frozen=True, slots=True)
class Receipt:
    """Under which contract an answer was produced, with every resolved value."""

    mode: Mode
    reason: str
    contract: Contract
    seed: int
    date: datetime.date
    coupling: Coupling
    transfer: Transfer
    eta: float
    max_draft: int
    plausibility: float
    draft_top_k: int | None
    transfer_temperature: float
    prompt_tokens: int
    cached_tokens: int
    choices: tuple[ChoiceStatistics, ...]
    chunks: tuple[ChunkUsed, ...]
    timings_ms: dict[str, float]  # queue, retrieval, target_prefill, drafter_prefill, draft, verify
    plain_from: tuple[int | None, ...] = ()  # per choice: position from which the drafter was lost
    failovers: tuple[Failover, ...] = ()  # what the answer went on after, in order
    is_fallback: bool = False  # plain because a drafter was wanted and could not be had
    explanation: Explanation | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """All choices are complete."""

    receipt: Receipt


GenerationEvent = Started | TextDelta | Finished


def as_prompt(token_ids: Sequence[int]) -> Int32Array:
    """Token ids as the array type of messages."""
    return np.asarray(token_ids, dtype=np.int32)
