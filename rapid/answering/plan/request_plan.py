"""The plan of a request: sampling, settings of the method and lengths.

All functions are pure, except `draw_seed`, and `sampling_of` where it draws a missing seed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from rapid.answering.plan.request_checks import (
    check_blocks,
    check_lengths,
    check_penalty,
    check_refresh,
    check_tokens,
    check_vllm_drafts,
)
from rapid.chat_messages import ThinkingRequest
from rapid.checkpoints.thinking_marks import SpokenMarks, ThinkingMarks
from rapid.config import PAPER, Mode, OwnDrafting, SamplingConfig, SpeculationConfig, ThinkingRule
from rapid.errors import BadRequest, PromptTooLong
from rapid.messages import GenerateRequest

if TYPE_CHECKING:
    from rapid.answering.leases.session import Role


_SEED_BITS = 53  # survives a client that reads JSON numbers as doubles

_HINTS: dict[Role, str] = {
    "target": " Shorten it, lower max_tokens, or use `mode: rag`, which reads only what retrieval "
    "finds in attached documents, `too_long: sections`, with which the target reads what fits, or "
    "`truncation: auto`, which leaves out the oldest turns.",
    "drafter": " Lower rapid.retrieval_tokens or max_tokens.",
}
_HINT_WITHOUT_RETRIEVAL = " Shorten it or lower max_tokens."


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """What is settled of a request before any of its text is read.

    Attributes:
        mode: The mode that the request names.
        role: Role of the engine that answers.
        own_drafting: Settings of a drafter for which nothing is retrieved; None if models draft.
        max_context: Longest prompt plus answer on an engine of each role, in tokens.
        default_max_tokens: Longest answer, in tokens, where the request names none.
        is_raw: Whether the prompt is no chat, and nothing is retrieved for it.
    """

    mode: Mode
    role: Role
    own_drafting: OwnDrafting | None
    sampling: SamplingConfig
    speculation: SpeculationConfig
    max_context: Mapping[Role, int]
    default_max_tokens: int
    is_raw: bool = False

    @classmethod
    def of(
        cls,
        request: GenerateRequest,
        defaults: SpeculationConfig,
        max_context: Mapping[Role, int],
        default_max_tokens: int,
        *,
        own_drafting: OwnDrafting | None,
        vocab_size: int,
        spell: Callable[[str], Sequence[int]],
        vllm_drafts: bool = False,
    ) -> Self:
        """Settle a request, and refuse what can never be answered.

        Raises:
            BadRequest: The settings cannot be served.
            PromptTooLong: The answer alone would fill the context.
        """
        check_refresh(request, own_drafting)
        check_penalty(request)
        plan = cls(
            request.speculation.mode,
            "drafter" if request.speculation.mode == "rag" else "target",
            own_drafting,
            sampling_of(request, spell_words(request.bad_words, spell)),
            speculation_of(request, defaults, own_drafting),
            max_context,
            default_max_tokens,
            bool(request.prompts),
        )
        longest, hint = max_context[plan.role], plan.hint(plan.role)
        check_lengths(request, longest, max_context["drafter"], whose=plan.role, hint=hint)
        check_tokens(plan.sampling, vocab_size)
        if vllm_drafts:
            check_vllm_drafts(request, plan.sampling, plan.speculation)
        if own_drafting is None:  # others have one candidate, or stay on the engine
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
        max_tokens = max_tokens if max_tokens is None else max(max_tokens, 1)  # a lease's least
        return answer_tokens(max_tokens, default, num_prompt, longest, whose=role, hint=hint)

    def room(self, max_tokens: int | None) -> int:
        """Return the longest prompt of the target, in tokens, beside an answer that is worth it.

        Where no length is wanted, that is the default, or a quarter of the context if it is less.
        """
        longest = self.max_context["target"]
        return longest - (max_tokens or min(self.default_max_tokens, longest // 4))

    @property
    def ignores_drafts(self) -> bool:
        """Whether the answer has the same tokens whatever the drafter proposes."""
        is_coupled = self.sampling.temperature == 0 or self.speculation.coupling == "shared_noise"
        return self.mode == "lossless" and self.speculation.rule == "exact" and is_coupled

    def hint(self, role: Role) -> str:
        """Return the advice for a prompt that is too long on an engine of this role."""
        has_no_retrieval = self.own_drafting or self.is_raw
        return _HINT_WITHOUT_RETRIEVAL if has_no_retrieval else _HINTS[role]


def draw_seed() -> int:
    """Return a random seed, for a request that has none."""
    return secrets.randbits(_SEED_BITS)


def spell_words(
    words: Sequence[str], spell: Callable[[str], Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of words, at the beginning of an answer and behind a space.

    `spell` returns those of a text.
    """
    spelled = {tuple(spell(start + word)) for word in words for start in ("", " ")}
    return tuple(sorted(spelled - {()}))


def sampling_of(
    request: GenerateRequest, bad_words: tuple[tuple[int, ...], ...] = ()
) -> SamplingConfig:
    """Return the sampling settings of a request; a missing seed is drawn at random."""
    seed = request.drawn_seed if request.seed is None else request.seed
    seed = draw_seed() if seed is None else seed
    names = SamplingConfig.model_fields.keys() - {"seed", "bad_words", "thinking"}
    given = {name: getattr(request, name) for name in names}
    return SamplingConfig(seed=seed, bad_words=bad_words, **given)


def check_thinking(request: GenerateRequest, marks: ThinkingMarks | SpokenMarks | None) -> None:
    """Refuse to have a model think that does not think apart, or to bound what cannot be.

    Raises:
        BadRequest: It has no marks of thinking, or none that are tokens.
    """
    asked = request.thinking
    if isinstance(marks, SpokenMarks) and (asked.budget is not None or asked.share is not None):
        raise BadRequest(
            "This model's thinking ends with a text of several tokens, which it cannot be made to "
            "say: turn thinking on or off, without a bound.",
            "reasoning_effort" if asked.budget is None else "thinking_token_budget",
            "unsupported",
        )
    if request.thinking.is_asked and (marks is None or request.prompts):
        budget = request.thinking.budget
        raise BadRequest(
            "This model has no thinking that is told apart from its answers: leave out what asks "
            "for it or bounds it.",
            "reasoning_effort" if budget is None else "thinking_token_budget",
            "unsupported",
        )


def rule_thinking(
    asked: ThinkingRequest,
    marks: ThinkingMarks | SpokenMarks | None,
    max_tokens: int,
    *,
    is_open: bool | None,
    has_grammar: bool,
) -> ThinkingRule | None:
    """Return what the tokens of an answer's thinking have to follow; None for nothing.

    Args:
        asked: How much is thought.
        marks: What opens and closes it.
        max_tokens: Longest answer, thinking included.
        is_open: Whether the prompt has opened it; None if none follows.
        has_grammar: Whether the answer behind it follows a grammar.
    """
    if not isinstance(marks, ThinkingMarks) or is_open is None:
        return None
    budget = asked.budget
    if asked.is_on is False:
        budget = 0
    elif budget is None and asked.share is not None:
        budget = int(asked.share * max_tokens)
    if budget is None and not has_grammar:
        return None
    return ThinkingRule(
        opening=marks.opening, closing=marks.closing, is_open=is_open, budget=budget
    )


def speculation_of(
    request: GenerateRequest, defaults: SpeculationConfig, own_drafting: OwnDrafting | None = None
) -> SpeculationConfig:
    """Return the speculation settings: the request's, else the configured ones.

    eta is 0 for `lossless`, for `OwnDrafting` and in modes without a drafter. A request with a seed
    should be reproducible, so its coupling is `shared_noise` unless it names another. `paper` has
    fixed settings of its own.
    """
    asked = request.speculation
    own = PAPER | {"rule": "paper"} if asked.mode == "paper" else {}
    seeded = "shared_noise" if request.seed is not None and not own else None
    given = {
        "transfer": asked.transfer,
        "eta": 0.0 if own_drafting or asked.mode in ("lossless", "plain", "rag") else asked.eta,
        "max_draft": asked.max_draft,
        "coupling": asked.coupling or seeded,
        "plausibility": asked.plausibility,
        "draft_top_k": asked.draft_top_k,
    }
    settings = defaults.model_dump() | own | {k: v for k, v in given.items() if v is not None}
    if asked.all_draft_tokens:
        settings["draft_top_k"] = None
    return SpeculationConfig(**settings)


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
        raise PromptTooLong.of(
            max_context,
            f"the {whose}'s prompt has {num_prompt} tokens and the answer needs room for {wanted}: "
            f"that is {over} more than the {whose}'s context of {max_context} tokens.{hint}",
        )
    return min(default, max_context - num_prompt) if asked is None else asked
