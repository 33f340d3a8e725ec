"""From what the caller asked to what is done: sampling, the method's settings, mode and contract.

Evidence chooses the contract: `auto` is `fused` when retrieval found something, else the target's
own distribution. So an `auto` request with a seed gives the same answer on an idle and on a busy
system, as long as both have a drafter for it. There is one exception, and the reply names it: when
no drafter can be had (none within `drafter_wait_s`, none alive, or retrieval does not answer),
`auto` is answered as `plain`, also where it would have been `fused`. `lossless` promises the same
distribution either way; `fused` or `paper` asked for by name is refused instead. A drafter lost on
the way leaves the rest of the answer to the target: ``plain_from`` says from which token. Pure
functions.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from rapid.config import PAPER, Contract, Mode, SamplingConfig, SpeculationConfig
from rapid.errors import BadRequest, PromptTooLong
from rapid.messages import GenerateRequest

FUSING: tuple[Mode, ...] = ("fused", "paper")  # asked for by name, they need a drafter

_ALONE = "the target went on alone"
_SEED_BITS = 53  # survives a client that reads JSON numbers as doubles


@dataclass(frozen=True, slots=True)
class Evidence:
    """What retrieval found, as far as the mode depends on it.

    Attributes:
        num_chunks: retrieved chunks that the drafter will read.
        why_none: what to tell the caller when there are none.
        is_lost: retrieval could not be asked.
    """

    num_chunks: int
    why_none: str = ""
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """The mode as resolved, why, and what it promises.

    Attributes:
        is_drafted: whether something drafts.
        is_fallback: whether a drafter was wanted and could not be had.
    """

    mode: Mode
    reason: str
    contract: Contract
    is_drafted: bool
    is_fallback: bool = False


def sampling_of(request: GenerateRequest) -> SamplingConfig:
    """How tokens are drawn; a request without a seed is given one."""
    seed = secrets.randbits(_SEED_BITS) if request.seed is None else request.seed
    return SamplingConfig(
        temperature=request.temperature, top_p=request.top_p, top_k=request.top_k, seed=seed
    )


def speculation_of(
    request: GenerateRequest, defaults: SpeculationConfig, *, looks_up: bool = False
) -> SpeculationConfig:
    """The method's settings: the request's, else the configured ones.

    `lossless`, prompt lookup and whatever has no drafter is eta 0. A request with a seed wants the
    same text again, so its coupling is `shared_noise` unless it says otherwise. `paper` has its
    own.
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
    """Refuse to retrieve again where that cannot be done exactly.

    Raises:
        BadRequest: several choices would need something else to read each, the rule `paper` splits
            answers by its bonus tokens, and prompt lookup retrieves nothing.
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


def decide(asked: Mode, evidence: Evidence) -> Decision:
    """The mode of a request that may use retrieval."""
    if asked == "plain":
        return Decision("plain", "asked for", "target", is_drafted=False)
    if asked == "rag":
        reason = "asked for"
        if not evidence.num_chunks:
            reason = f"asked for, but {evidence.why_none}: the drafter answered without documents"
        return Decision("rag", reason, "drafter", is_drafted=False)
    if asked == "lossless":
        if evidence.is_lost:
            return without_drafter(evidence.why_none)
        return Decision("lossless", "asked for", "target", is_drafted=True)
    if evidence.num_chunks and asked == "paper":
        return Decision("paper", "asked for", "paper", is_drafted=True)
    if evidence.num_chunks:
        reason = "asked for" if asked == "fused" else "retrieval cleared its floor"
        return Decision("fused", reason, "fused", is_drafted=True)
    if asked in FUSING:
        reason = f"asked for, but {evidence.why_none}: nothing to fuse with"
        return Decision(asked, reason, "target", is_drafted=False)
    return Decision("plain", evidence.why_none, "target", is_drafted=False)


def decide_lookup(asked: Mode) -> Decision:
    """The mode where the prompt is looked up in instead of retrieved from.

    Raises:
        BadRequest: the mode needs a drafter that reads.
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
    reason = "asked for, drafted by prompt lookup"
    if asked == "auto":
        reason = "prompt lookup drafts: nothing to fuse with"
    return Decision("lossless", reason, "target", is_drafted=True)


def without_drafter(why: str) -> Decision:
    """What becomes of `auto` and `lossless` when no drafter can be had."""
    return Decision("plain", f"{why}: {_ALONE}", "target", is_drafted=False, is_fallback=True)


def answer_tokens(
    asked: int | None, default: int, num_prompt: int, max_context: int, *, hint: str = ""
) -> int:
    """The longest answer: what was asked for, or the default cut to the room that is left.

    Args:
        hint: what would work instead, for the error.

    Raises:
        PromptTooLong: by how many tokens.
    """
    wanted = 1 if asked is None else asked
    over = num_prompt + wanted - max_context
    if over > 0:
        raise PromptTooLong(
            f"The prompt has {num_prompt} tokens and the answer may have {wanted}: that is "
            f"{over} more than the model's context of {max_context} tokens.{hint}"
        )
    return min(default, max_context - num_prompt) if asked is None else asked
