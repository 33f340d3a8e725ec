"""The messages between components, in the order in which a request meets them.

Arrays are numpy and not torch, because Ray maps numpy read-only out of shared memory without a
copy. Positions count generated tokens from 0: the first answer token of a choice has position 0.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from rapid.chat_messages import DocumentRef, Message, ThinkingRequest, Tools
from rapid.receipt import MOST_EXPLAINED, Origin, TokenProbs

if TYPE_CHECKING:  # `benchmarks/gpu.py` runs without pydantic
    from rapid.config import (
        Coupling,
        KVCacheDtype,
        Mode,
        SamplingConfig,
        SpeculationConfig,
        TooLong,
    )

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
RawPrompt = str | tuple[int, ...]


# --- caller -> orchestrator ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpeculationRequest:
    """The speculation settings of one request; None stands for the configured default.

    Attributes:
        all_draft_tokens: Whether `draft_top_k` was explicitly null, for a proposal without a cut.
        refresh: Whether to retrieve again, for the answer so far, after rejected drafts.
        too_long: What becomes of documents that do not fit the target's context.
        truncates: Whether the oldest turns of a chat that does not fit it are left out.
    """

    mode: Mode = "auto"
    transfer: str | None = None
    eta: float | None = None
    max_draft: int | None = None
    coupling: Coupling | None = None
    plausibility: float | None = None
    draft_top_k: int | None = None
    all_draft_tokens: bool = False
    refresh: bool = False
    too_long: TooLong = "refuse"
    truncates: bool = False


def new_call_id() -> str:
    """Return an id that no other call has."""
    return uuid4().hex


def utc_day() -> datetime.date:
    """Return today's date in UTC."""
    return datetime.datetime.now(datetime.UTC).date()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A validated request with its tenant, as the ingress hands it to the orchestrator.

    Attributes:
        request_id: Id that log lines give, as the caller's. Several requests may have the same.
        call_id: Id that no other request has.
        drawn_seed: Seed where the caller gives none, drawn once by whoever may have to send the
            request again. It does not change the coupling, as a seed of the caller's does.
        num_logprobs: Number of alternatives beside each token's log-probability: None for no
            log-probabilities, 0 for those of the chosen tokens only.
        is_streamed: Whether the caller receives the answer while it is generated.
        explain: Whether the receipt says of each token who wrote it, and `explains_prompts` whether
            with the token ids of the prompts, from which it can be computed again.
        date: Date for chat templates that state one; the day of the request unless the caller
            names another. It is fixed once, so that all prompts of the request agree.
        cache_salt: Part of the names of the prompt's pages: a tenant's requests share KV by salt.
        logit_bias: Pairs of a token id and what is added to its logit.
        presence_penalty: See `rapid.config.SamplingConfig`, as for those up to `grammar`.
        penalize_documents: Whether a `repetition_penalty` is meant for documents as well.
        bad_words: Texts that no answer has.
        include_stop_str_in_output: Whether an answer's text has the stop that ended it.
        model: Name of the model that is asked, for an ingress with several.
        citations: Whether the receipt says where the answers are from.
        tools: What the answers may call; None for nothing.
        thinking: How much the model shall think.
        weight: How many shares of one tenant this one has, where several want work done.
        ignored: Names of the body's fields that change nothing, for the receipt.
        prompts: Texts or token ids that answers continue, in place of `messages` and without a
            chat template; each has `num_choices` answers.
        adds_special_tokens: Whether a text of `prompts` begins as the tokenizer begins texts.
        echoes_prompt: Whether an answer begins with its prompt, which may have log-probabilities.
        priority: Place among the tenant's own requests that wait; the smaller, the sooner.
        num_known: Leading tokens of the prompt whose log-probabilities are known already.
    """

    request_id: str
    tenant: str
    messages: tuple[Message, ...]
    documents: tuple[DocumentRef, ...] = ()
    query: str | None = None
    retrieval_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    num_choices: int = 1
    stop: tuple[str, ...] = ()
    num_logprobs: int | None = None
    is_streamed: bool = False
    speculation: SpeculationRequest = field(default_factory=SpeculationRequest)
    explain: bool = False
    explains_prompts: bool = True
    call_id: str = field(default_factory=new_call_id, compare=False)
    date: datetime.date = field(default_factory=utc_day)
    cache_salt: str = ""
    drawn_seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    allowed_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    penalize_documents: bool = False
    min_p: float = 0.0
    bad_words: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    grammar: str | None = None
    model: str = ""
    citations: bool = False
    tools: Tools | None = None
    thinking: ThinkingRequest = field(default_factory=ThinkingRequest)
    weight: int = 1
    ignored: tuple[str, ...] = ()
    prompts: tuple[RawPrompt, ...] = ()
    adds_special_tokens: bool = True
    echoes_prompt: bool = False
    num_known: int = 0
    priority: int = 0

    @property
    def num_answers(self) -> int:
        """The number of answers, over all prompts."""
        return self.num_choices * max(1, len(self.prompts))


# --- orchestrator -> engine ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Terms:
    """Settings that all leases of one request share.

    Attributes:
        max_tokens: Longest answer, in tokens; its pages are reserved, so no lease is preempted.
        num_choices: Number of answers to the prompt.
        num_logprobs: Alternatives beside each committed token; None for no log-probabilities.
        cache_salt: Part of the names of the prompts' pages, beside the tenant.
        is_streamed: Whether the answer is read while it grows.
        request_id: Id of the request in log lines; several requests may have the same.
        answer_id: Id that no other request has: blocks are drafted and judged under the same one.
        documents: Names of those in its prompts (`rapid.documents.name_text`), for `forget`.
        weight: How many shares of one tenant this one has, where several want work done.
        priority: Place among the tenant's own requests that wait; the smaller, the sooner.
        prompt_set: The tokens of the prompt of the model that answers (`pack_tokens`), where a
            setting is about them: what the others read is not theirs to count.
        explains: Whether verdicts say how likely their tokens were.
    """

    tenant: str
    sampling: SamplingConfig
    speculation: SpeculationConfig
    max_tokens: int
    num_choices: int = 1
    num_logprobs: int | None = None
    cache_salt: str = ""
    is_streamed: bool = False
    request_id: str = ""
    answer_id: str = ""
    documents: frozenset[str] = frozenset()
    weight: int = 1
    prompt_set: bytes = b""
    priority: int = 0
    explains: bool = False

    def explains_at(self, position: int) -> bool:
        """Return whether the tokens from a generated position on are explained."""
        return self.explains and position < MOST_EXPLAINED


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """A request for a lease: room on one engine for all choices, which share the prompt's KV.

    Attributes:
        lease_id: Unique id, ``request id/role-suffix``, so that an engine's log names the request.
        prompt_ids: Token ids of the prompt, one row.
        committed: Per choice, tokens already generated elsewhere, if this lease replaces another.
        log_odds: Per choice, the last verdict's log odds, where `committed` is given.
        companion_tokens: Approximate length of the drafter's prompt, in tokens, on an engine that
            drafts for itself; the engine keeps room for a second lease of this request. 0 if there
            will be none. With `beside`, another one will follow this lease, in the same room.
        beside: Id of the request's first lease on this engine, which keeps room for this one.
        affinity: Name of what the prompt is about; a pool prefers the replica that has read it.
        traceparent: Place in the request's trace (W3C) of the lease's calls; empty if not traced.
        masks: Per choice, positions [a, b) of the prompt that its committed tokens do not see.
        scored_from: First token of the prompt whose log-probability is wanted; None for none.
        passages: Positions [a, b) of the prompt, in order, that a drafter's engine may read each by
            itself (`rapid.engines.kv.passages`); only where the answer ignores what is drafted.
    """

    lease_id: str
    terms: Terms
    prompt_ids: Int32Array
    committed: tuple[tuple[int, ...], ...] = ()
    log_odds: tuple[float, ...] = ()
    companion_tokens: int = 0
    beside: str | None = None
    affinity: str = ""
    traceparent: str = ""
    masks: tuple[tuple[int, int], ...] = ()
    scored_from: int | None = None
    passages: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillReceipt:
    """Confirmation that the prompt's KV is in place.

    Attributes:
        num_tokens: Length of the prompt, of which `num_cached_tokens` were found in a cache.
        kv_cache_dtype: The engine's setting: ``fp8`` where it keeps KV in eight bits.
        scores: Per mask, the model's own log-probability of each committed token; else none.
        prompt_scores: The model's own log-probabilities of the prompt's tokens, from `scored_from`
            or the second on; the first has none, since nothing precedes it.
        num_placed_tokens: Tokens of passages that were read for an earlier prompt.
        reads_apart: Whether the passages that the request names were read each by itself.
    """

    lease_id: str
    num_tokens: int
    num_cached_tokens: int
    kv_cache_dtype: KVCacheDtype = "auto"
    scores: tuple[tuple[float, ...], ...] = ()
    prompt_scores: tuple[TokenLogprobs, ...] = ()
    num_placed_tokens: int = 0
    reads_apart: bool = False


class ReadSoFar(NamedTuple):
    """How far a prefill has come.

    Attributes:
        num_tokens: Tokens of the prompt that are read.
        num_cached: Those of them that were found in a cache.
    """

    num_tokens: int = 0
    num_cached: int = 0


# --- drafter -> target --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """A draft block: up to `max_draft` tokens, each with the distribution it was drawn from.

    Row i holds the proposal at generated position ``position + i``: ``candidate_probs[i]`` sums to
    one over ``candidate_ids[i]``; tokens not listed have probability zero. Rows are padded with id
    -1 and probability 0 when fewer candidates survive the filters.

    Attributes:
        token_ids: Drafted tokens [k].
        candidate_ids: Tokens of each proposal [k, m].
        candidate_probs: Probabilities of the candidates, float32 [k, m].
        draft_ms: Milliseconds that drafting took.
        num_forced: How many of the tokens were the only ones that a grammar allows, and so were
            drafted without a forward.
        digest: Digest of the request, the choice and its committed text, on which alone the block
            may be judged. None where it is made beside the loop that has it judged.
    """

    lease_id: str
    choice: int
    position: int
    token_ids: Int32Array
    candidate_ids: Int32Array
    candidate_probs: Float32Array
    draft_ms: float = 0.0
    digest: int | None = None
    num_forced: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)


# --- target -> loop (and, by the loop, -> drafter) ----------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of a committed token and of the best alternatives, before filters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one round: accepted draft tokens and, after a rejection, the corrected token.

    Under the rule `exact` a block has no bonus token, so ``len(token_ids)`` is at most the block's
    length, unless a grammar cut it; `paper` adds one to a block that was accepted whole. An
    end-of-sequence token is the last of ``token_ids`` and sets ``is_finished``; nothing follows it.

    Attributes:
        token_ids: Tokens that the round committed.
        num_drafted: Number of drafted tokens in the block; 0 for plain decoding.
        num_accepted: Number of leading tokens of ``token_ids`` that the drafter proposed.
        log_odds: Log odds of drafter against target on the answer so far (``adaptive`` only).
        draft_ms: Milliseconds that drafting took, as `verify_ms` are those of verification.
        num_forced: See `DraftBlock`.
        probs: How likely each token was, where `Terms.explains`; else none.
    """

    lease_id: str
    choice: int
    position: int
    token_ids: tuple[int, ...]
    num_drafted: int
    num_accepted: int
    is_finished: bool
    logprobs: tuple[TokenLogprobs, ...] = ()
    log_odds: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    num_forced: int = 0
    probs: tuple[TokenProbs, ...] = ()

    @property
    def origins(self) -> tuple[Origin, ...]:
        """The origin of each committed token."""
        rest: Origin = "corrected" if self.num_drafted else "target"
        if self.num_drafted and self.num_accepted == self.num_drafted:
            rest = "bonus"
        origins: list[Origin] = ["drafted"] * self.num_accepted
        return (*origins, *([rest] * (len(self.token_ids) - self.num_accepted)))


@dataclass(frozen=True, slots=True)
class TargetLogits:
    """The target's logits for a block that is judged elsewhere, float32 [rows, vocab]."""

    lease_id: str
    choice: int
    position: int
    logits: Float32Array
    verify_ms: float = 0.0


def as_prompt(token_ids: Sequence[int]) -> Int32Array:
    """Return token ids as the array type of messages."""
    return np.asarray(token_ids, dtype=np.int32)
