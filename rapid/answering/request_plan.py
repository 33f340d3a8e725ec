"""The plan of a request, and its mode: sampling, settings of the method, lengths and contract.

All functions are pure, except `draw_seed`, and `sampling_of` where it draws a missing seed.

Evidence chooses the contract: `auto` is `fused` when what retrieval found has enough to do with the
question, and the drafter, where it is asked, says that it answers it; else the target's own
distribution. So an `auto` request with a seed gives the same answer
on an idle and on a busy system, as long as both have a drafter for it.

What a mode needs and does not get is dealt with by one rule:

* **No drafter** (none within `drafter_wait_s`, none alive, or lost before the first token) **or no
  retrieval** (it does not answer, or is still indexing): `auto` and `lossless` are answered as
  `plain`, and the receipt says so (`is_fallback`). Explicit `fused`, `paper` and `rag` are refused.
* **Retrieval that finds nothing** is an answer: `fused` and `paper` sample the target, `rag`
  answers without documents, and the receipt says so (`is_fallback`). `auto` is `plain`, as its
  evidence has it, and `lossless` drafts from the question.
* **`rag` without any text to search** is refused as a mistake of the caller's.

When a drafter is lost later, the target decodes the rest; ``plain_from`` is the first such token.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, assert_never

from rapid.config import PAPER, Contract, Mode, SamplingConfig, SpeculationConfig
from rapid.errors import BadRequest, PromptTooLong, RetrievalUnavailable
from rapid.messages import GenerateRequest
from rapid.receipt import Cause

if TYPE_CHECKING:
    from rapid.answering.session import Role

FUSING: tuple[Mode, ...] = ("fused", "paper")  # modes that need a drafter when set explicitly

_SENTENCES: dict[Cause, str] = {
    "asked for": "asked for",
    "evidence found": "retrieval found evidence",
    "evidence too weak": "what retrieval found has too little to do with the question",
    "drafter can answer": "the drafter finds the answer in what was retrieved",
    "drafter cannot answer": "the drafter does not find the answer in what was retrieved",
    "prompt lookup": "prompt lookup drafts: nothing to fuse with",
    "nothing to retrieve from": "there is nothing to retrieve from",
    "nothing above the floor": "retrieval found nothing above its floor",
    "nothing fits the budget": "no retrieved chunk fits the budget",
    "still indexing": "the documents were still being indexed for retrieval; ask again later",
    "retrieval lost": "retrieval did not answer",
    "drafter's prompt too long": "what the drafter would read does not fit",
    "no drafter": "no drafter could be had",
    "drafter lost": "the drafter was lost before the first token",
}
SAYS_NOTHING = tuple(
    _SENTENCES[cause]
    for cause in ("nothing above the floor", "evidence too weak", "drafter cannot answer")
)
"""Parts of reasons which say that the documents are not about the question."""

_SEED_BITS = 53  # survives a client that reads JSON numbers as doubles
MOST_BLOCK_BYTES = 32 * 2**20  # of a round's blocks, which cross processes
_CANDIDATE_BYTES = 8  # of a candidate in a block: an int32 id and a float32 probability


_HINTS: dict[Role, str] = {
    "target": " Shorten it, lower max_tokens, or use `mode: rag`, which reads only what retrieval "
    "finds in attached documents.",
    "drafter": " Lower rapid.retrieval_tokens or max_tokens.",
}
_HINT_OF_LOOKUP = " Shorten it or lower max_tokens."


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """What is settled of a request before any of its text is read.

    Attributes:
        mode: The mode that the request names.
        role: Role of the engine that answers.
        looks_up: Whether drafts come from prompt lookup, and nothing is retrieved.
        max_context: Longest prompt plus answer on an engine of each role, in tokens.
        default_max_tokens: Longest answer, in tokens, where the request names none.
    """

    mode: Mode
    role: Role
    looks_up: bool
    sampling: SamplingConfig
    speculation: SpeculationConfig
    max_context: Mapping[Role, int]
    default_max_tokens: int

    @classmethod
    def of(
        cls,
        request: GenerateRequest,
        defaults: SpeculationConfig,
        max_context: Mapping[Role, int],
        default_max_tokens: int,
        *,
        looks_up: bool,
        vocab_size: int,
    ) -> Self:
        """Settle a request, and refuse what can never be answered.

        Raises:
            BadRequest: The settings cannot be served.
            PromptTooLong: The answer alone would fill the context.
        """
        check_refresh(request, looks_up=looks_up)
        plan = cls(
            request.speculation.mode,
            "drafter" if request.speculation.mode == "rag" else "target",
            looks_up,
            sampling_of(request),
            speculation_of(request, defaults, looks_up=looks_up),
            max_context,
            default_max_tokens,
        )
        longest, hint = max_context[plan.role], plan.hint(plan.role)
        check_lengths(request, longest, max_context["drafter"], whose=plan.role, hint=hint)
        if not looks_up:
            check_blocks(request, plan.speculation, vocab_size)
        return plan

    def fit(self, role: Role, num_prompt: int, max_tokens: int | None) -> int:
        """Return the longest answer, in tokens, that fits on an engine of this role.

        Args:
            role: Role of the engine.
            num_prompt: Length of its prompt, in tokens.
            max_tokens: Longest answer that is wanted; None takes the default.

        Raises:
            PromptTooLong: The prompt does not fit.
        """
        longest, hint = self.max_context[role], self.hint(role)
        default = self.default_max_tokens
        return answer_tokens(max_tokens, default, num_prompt, longest, whose=role, hint=hint)

    def hint(self, role: Role) -> str:
        """Return the advice for a prompt that is too long on an engine of this role."""
        return _HINT_OF_LOOKUP if self.looks_up else _HINTS[role]


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


def draw_seed() -> int:
    """Return a random seed, for a request that has none."""
    return secrets.randbits(_SEED_BITS)


def sampling_of(request: GenerateRequest) -> SamplingConfig:
    """Return the sampling settings of a request; a missing seed is drawn at random."""
    seed = request.drawn_seed if request.seed is None else request.seed
    seed = draw_seed() if seed is None else seed
    return SamplingConfig(
        temperature=request.temperature, top_p=request.top_p, top_k=request.top_k, seed=seed
    )


def speculation_of(
    request: GenerateRequest, defaults: SpeculationConfig, *, looks_up: bool = False
) -> SpeculationConfig:
    """Return the speculation settings: the request's, else the configured ones.

    eta is 0 for `lossless`, for prompt lookup and in modes without a drafter. A request with a seed
    should be reproducible, so its coupling is `shared_noise` unless it names another. `paper` has
    fixed settings of its own.
    """
    asked = request.speculation
    own = PAPER | {"rule": "paper"} if asked.mode == "paper" else {}
    seeded = "shared_noise" if request.seed is not None and not own else None
    given = {
        "transfer": asked.transfer,
        "eta": 0.0 if looks_up or asked.mode in ("lossless", "plain", "rag") else asked.eta,
        "max_draft": asked.max_draft,
        "coupling": asked.coupling or seeded,
        "plausibility": asked.plausibility,
        "draft_top_k": asked.draft_top_k,
    }
    settings = defaults.model_dump() | own | {k: v for k, v in given.items() if v is not None}
    if asked.all_draft_tokens:
        settings["draft_top_k"] = None
    return SpeculationConfig(**settings)


def check_refresh(request: GenerateRequest, *, looks_up: bool) -> None:
    """Raise an error if a request wants to retrieve again where that cannot be done exactly.

    Raises:
        BadRequest: The request has several choices, which would each need a prompt of their own;
            or its mode is `paper`, whose bonus tokens are never drafted; or drafts come from
            prompt lookup, which retrieves nothing.
    """
    if not request.speculation.refresh:
        return
    why = None
    if request.num_choices > 1:
        why = "goes with one choice: leave out n"
    elif request.speculation.mode == "paper":
        why = "is not part of mode 'paper': leave it out, or use 'fused'"
    elif looks_up:
        why = "needs a drafter that reads, and this server drafts by prompt lookup: leave it out"
    if why:
        raise BadRequest(f"rapid.refresh {why}", "rapid.refresh", "invalid_value")


def too_long(max_context: int, why: str, param: str = "messages") -> PromptTooLong:
    """Return the error of a prompt or answer that does not fit.

    It begins with vLLM's sentence, by which clients such as litellm and LangChain know it.
    """
    start = f"This model's maximum context length is {max_context} tokens. However, "
    return PromptTooLong(start + why, param)


def check_lengths(
    request: GenerateRequest,
    max_context: int,
    drafter_context: int,
    *,
    whose: str = "target",
    hint: str = "",
) -> None:
    """Raise an error for lengths that fit no prompt at all, before any text is tokenized.

    Args:
        request: The request.
        max_context: Longest prompt plus answer of the model that answers, in tokens.
        drafter_context: Longest prompt plus answer of the model that drafts, in tokens.
        whose: Role of the model that answers, which the error names.
        hint: Advice that is appended to the error about the answer.

    Raises:
        PromptTooLong: The answer alone would fill the context.
        BadRequest: The retrieved text alone would fill the drafter's context.
    """
    if request.max_tokens is not None and request.max_tokens >= max_context:
        raise too_long(
            max_context,
            f"a prompt with an answer of {request.max_tokens} tokens is longer than the "
            f"{whose}'s context of {max_context} tokens.{hint}",
            "max_tokens",
        )
    budget = request.retrieval_tokens
    if budget is not None and budget >= drafter_context:
        raise BadRequest(
            f"rapid.retrieval_tokens must be below the drafter's context of {drafter_context} "
            f"tokens; it is {budget}.",
            "rapid.retrieval_tokens",
            "invalid_value",
        )


def check_blocks(request: GenerateRequest, speculation: SpeculationConfig, vocab_size: int) -> None:
    """Raise an error if the blocks of one round, over all choices, would be too large to move.

    Args:
        request: The request.
        speculation: The resolved settings.
        vocab_size: Number of tokens that a proposal without a cut holds.

    Raises:
        BadRequest: The draft is too long for so many candidates to each token.
    """
    if request.speculation.mode in ("plain", "rag"):
        return
    num_kept = min(speculation.draft_top_k or vocab_size, vocab_size)
    num_bytes = request.num_choices * speculation.max_draft * num_kept * _CANDIDATE_BYTES
    if num_bytes > MOST_BLOCK_BYTES:
        raise BadRequest(
            f"a round of {request.num_choices} x {speculation.max_draft} drafted tokens with "
            f"{num_kept} candidates each has {num_bytes} bytes, and {MOST_BLOCK_BYTES} is the "
            "most: lower rapid.max_draft, rapid.draft_top_k or n",
            "rapid.draft_top_k",
            "invalid_value",
        )


def decide(asked: Mode, evidence: Evidence) -> Decision:
    """Choose the mode from the requested one and the outcome of retrieval.

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
        return without_drafter(evidence.cause)
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


def decide_lookup(asked: Mode) -> Decision:
    """Choose the mode of a request whose drafts come from prompt lookup.

    Raises:
        BadRequest: The mode needs a drafter that reads retrieved text.
    """
    if asked == "plain":
        return Decision("plain", "asked for", "target", is_drafted=False)
    if asked not in ("auto", "lossless"):
        raise BadRequest(
            f"rapid.mode {asked!r} needs a drafter that reads what retrieval finds, and this "
            "server drafts by prompt lookup: use 'lossless' or 'plain', or configure `drafter` "
            "with an engine, or as `target`",
            "rapid.mode",
            "invalid_value",
        )
    if asked == "auto":
        return Decision("lossless", "prompt lookup", "target", is_drafted=True)
    detail = ", drafted by prompt lookup"
    return Decision("lossless", "asked for", "target", is_drafted=True, detail=detail)


def without_drafter(cause: Cause, *, at_start: bool = True) -> Decision:
    """Return the decision for `auto` and `lossless` when no drafter is available.

    Args:
        cause: Why there is none.
        at_start: Whether that was known when the answer began, and no draft was expected.
    """
    detail = ": the target went on alone"
    return Decision("plain", cause, "target", not at_start, is_fallback=True, detail=detail)


def answer_tokens(
    asked: int | None,
    default: int,
    num_prompt: int,
    max_context: int,
    *,
    whose: str = "target",
    hint: str = "",
) -> int:
    """Return the longest answer in tokens: as requested, or the default cut to the room left.

    Args:
        asked: Requested length; None takes the default.
        default: Default length.
        num_prompt: Length of the prompt, in tokens.
        max_context: Longest prompt plus answer, in tokens.
        whose: Role of the model whose prompt and context these are, which the error names.
        hint: Advice that is appended to the error.

    Raises:
        PromptTooLong: The prompt with the requested length, or with one token, does not fit.
    """
    wanted = 1 if asked is None else asked
    over = num_prompt + wanted - max_context
    if over > 0:
        raise too_long(
            max_context,
            f"the {whose}'s prompt has {num_prompt} tokens and the answer may have {wanted}: that "
            f"is {over} more than the {whose}'s context of {max_context} tokens.{hint}",
        )
    return min(default, max_context - num_prompt) if asked is None else asked
