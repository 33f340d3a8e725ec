"""One request while it runs: what it has held, read, answered and lost so far."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

from rapid.answering.answers import GrowingAnswer
from rapid.answering.leases.session import DraftSource, Role, Session
from rapid.answering.leases.sources import LookupSource
from rapid.answering.mode.decisions import FUSING, Decision, without_drafter
from rapid.answering.plan.request_plan import RequestPlan, check_thinking, rule_thinking
from rapid.answering.services import Services
from rapid.calling.call_forms import compile_calls
from rapid.calling.tagged_reader import open_reader
from rapid.checkpoints.text import ChatText
from rapid.checkpoints.vocabulary import pack_tokens
from rapid.config import Mode
from rapid.documents import name_text
from rapid.errors import DrafterUnavailable, RapidError, TargetHangs
from rapid.messages import GenerateRequest, Int32Array, PrefillReceipt, Terms
from rapid.ports import Passage
from rapid.receipt import Failover, ReadPart

logger = logging.getLogger(__name__)

_MAX_FAILOVERS = 2  # targets that a request may lose; the next loss fails it
_TARGETS_FAILOVERS: tuple[Failover, ...] = ("target lost", "target hung")


@dataclass(slots=True)
class Run:
    """The state of one request: its plan, and all that changes while it is answered.

    Attributes:
        session: The leases that it holds; set once the prompt of the model that answers is known.
        decision: The resolved mode; None while it is open.
        source: Source of the drafts; None if the answers are not drafted, or no longer.
        text: The text itself as a source, beside or in place of that one.
        answers: The answers, one for each choice.
        is_started: Whether the first leases were held and the response may have begun.
        prompts: Prompts of target, drafter and witness, by role.
        chunks: Retrieved chunks in the drafter's prompt.
        joined_query: What was searched for, if it is the question with those before it.
        passages: Parts of the drafter's prompt that it reads each by itself, as token positions.
        prefill: Prefill receipt of the model that answers.
        failovers: Failures after which the answer was continued, in order.
        left_out: Places of the messages that the target does not read, as the chat is too long.
        sections: What the target reads of documents that do not fit its context.
        retrieval_ms: Milliseconds spent on retrieval.
        has_told_prompt: Whether the answers have begun with their prompt, if they are to.
    """

    services: Services
    request: GenerateRequest
    plan: RequestPlan = field(init=False)
    session: Session = field(init=False, repr=False)
    decision: Decision | None = None
    source: DraftSource | None = None
    text: LookupSource = field(default_factory=LookupSource, repr=False)
    answers: list[GrowingAnswer] = field(default_factory=list)
    is_started: bool = False
    prompts: dict[Role, Int32Array] = field(default_factory=dict)
    chunks: tuple[Passage, ...] = ()
    joined_query: str | None = None
    passages: tuple[tuple[int, int], ...] = ()
    prefill: PrefillReceipt | None = None
    failovers: list[Failover] = field(default_factory=list)
    left_out: tuple[int, ...] = ()
    sections: tuple[ReadPart, ...] = ()
    retrieval_ms: float = 0.0
    has_told_prompt: bool = False

    def __post_init__(self) -> None:
        self.replan(self.request.speculation.mode)

    def replan(self, mode: Mode) -> None:
        """Settle the request in a mode, before anything of it is read.

        Raises:
            BadRequest: The settings cannot be served.
            PromptTooLong: The answer alone would fill the context.
        """
        services = self.services
        asked = replace(self.request.speculation, mode=mode)
        self.request = replace(self.request, speculation=asked)
        check_thinking(self.request, self._text.thinking_marks)
        self.plan = RequestPlan.of(
            replace(self.request, grammar=self._grammar),
            services.speculation,
            services.pools.max_context,
            services.config.default_max_tokens,
            own_drafting=services.pools.own_drafting,
            vocab_size=services.prompts.vocab_size,
            spell=services.prompts.target.encode,
            vllm_drafts=services.pools.vllm_drafts,
        )

    @property
    def _text(self) -> ChatText:
        """The text of the model that answers."""
        prompts = self.services.prompts
        return prompts.drafter if self.request.speculation.mode == "rag" else prompts.target

    @property
    def _grammar(self) -> str | None:
        """The grammar of the answers, calls included."""
        request = self.request
        tools, given = request.tools, request.grammar
        if tools is None:
            return given
        is_bounded = request.min_tokens or request.allowed_token_ids or request.bad_words
        # Strict tools are refused there, rather than drafted for without their grammar.
        is_strict = any(each.is_strict for each in tools.callable_ones)
        has_vllm = self.services.pools.vllm_drafts and request.speculation.mode != "plain"
        is_free = is_bounded or request.ignore_eos or (has_vllm and not is_strict)
        if is_free and not tools.must_call:
            return given  # which a grammar would contradict, or nobody would follow
        return compile_calls(tools, self._text.call_form, self._text.call_tokens, given)

    @property
    def has_begun(self) -> bool:
        """Whether the request held leases before: it is not refused for want of room any more."""
        return self.is_started or bool(self.failovers)

    @property
    def committed(self) -> list[list[int]]:
        """Tokens of each choice so far, for a new lease.

        The list is empty for a request's first leases. A pool may refuse those for want of room,
        and no others.
        """
        if not self.has_begun:
            return []
        return [answer.statistics.token_ids for answer in self.answers]

    @property
    def scored_from(self) -> int | None:
        """First token of the prompt whose log-probability is still to be told; None for none."""
        request = self.request
        is_scored = request.echoes_prompt and request.num_logprobs is not None
        return max(1, request.num_known) if is_scored and not self.has_told_prompt else None

    @property
    def has_lost_drafter(self) -> bool:
        """Whether an answer goes on without its drafter."""
        return any(answer.statistics.plain_from is not None for answer in self.answers)

    @property
    def needs_drafter(self) -> bool:
        """Whether an answer without the drafter would have nothing of what was asked for."""
        has_tokens = any(answer.statistics.token_ids for answer in self.answers)
        return self.plan.mode in FUSING and not has_tokens

    @property
    def is_paced(self) -> bool:
        """Whether draft lengths are chosen; otherwise each is `max_draft`.

        The rule `paper` has one length. A request with a seed under `maximal` coupling should be
        reproducible, but there the text would depend on when the drafter rests.
        """
        sampling, speculation = self.plan.sampling, self.plan.speculation
        is_drawn = self.request.seed is not None and sampling.temperature > 0
        is_fixed = self.services.config.draft_length == "fixed" or speculation.rule == "paper"
        return not (is_fixed or (is_drawn and speculation.coupling == "maximal"))

    @property
    def drafts_from_text(self) -> bool:
        """Whether the text itself may draft beside a drafter, and without one.

        The answer must have the same tokens whoever drafts, so that a receipt says all that they
        depend on, and draft lengths be measured, since the text has often nothing to propose. A
        request that retrieves again has one drafter.
        """
        is_alone = self.plan.own_drafting or self.request.speculation.refresh
        return self.plan.ignores_drafts and self.is_paced and not is_alone

    @property
    def outcome(self) -> Decision:
        """The mode, reason and contract of the receipt.

        They are those of the decision, unless the answers have lost their drafter before the first
        token, and so are all the target's own.
        """
        assert self.decision is not None
        is_plain = all(answer.statistics.plain_from == 0 for answer in self.answers)
        decision = self.decision
        if decision.is_drafted and is_plain:
            by_text = self.drafts_from_text
            decision = without_drafter("drafter lost", at_start=False, by_text=by_text)
        copied = sum(answer.statistics.copied for answer in self.answers)
        if copied and self.drafts_from_text:
            kept = sum(answer.statistics.copied_accepted for answer in self.answers)
            copies = f"; of {copied} tokens that the text itself drafted {kept} were kept"
            return replace(decision, detail=decision.detail + copies)
        return decision

    def open_session(self) -> Session:
        """Begin the answers, and return the session of their leases.

        Raises:
            PromptTooLong: The prompt with its answer does not fit the context.
        """
        request, plan = self.request, self.plan
        prompt_ids, text = self.prompts[plan.role], self._text
        max_tokens = plan.fit(plan.role, len(prompt_ids), request.max_tokens)
        is_thinking = None if request.prompts else text.find_thinking(prompt_ids.tolist())
        thinking = rule_thinking(
            request.thinking,
            text.thinking_marks,
            max_tokens,
            is_open=is_thinking,
            has_grammar=plan.sampling.grammar is not None,
        )
        terms = Terms(
            request.tenant,
            plan.sampling.model_copy(update={"thinking": thinking}),
            plan.speculation,
            max_tokens,
            request.num_choices,
            request.num_logprobs,
            request.cache_salt,
            request.is_streamed,
            request.request_id,
            documents=frozenset(
                name_text(request.tenant, each.digest) for each in request.documents
            ),
            weight=request.weight,
            priority=request.priority,
            prompt_set=pack_tokens(prompt_ids) if plan.sampling.repetition_penalty != 1 else b"",
            explains=request.explain,
        )
        tools = request.tools
        self.answers = [
            GrowingAnswer(
                choice,
                text,
                request.stop,
                terms.max_tokens,
                open_reader(text.call_form, tools.callable_ones) if tools else None,
                # Stays the same where another orchestrator generates the answer again.
                str(request.drawn_seed or request.call_id),
                request.stop_token_ids,
                includes_stop=request.include_stop_str_in_output,
                is_continued=bool(request.prompts),
                is_thinking=is_thinking,
            )
            for choice in range(request.num_choices)
        ]
        self.session = Session(terms)
        return self.session

    def lose_target(self, error: RapidError) -> None:
        """Note that the target is lost, and why; raise `error` if it was not the first ones."""
        if sum(how in _TARGETS_FAILOVERS for how in self.failovers) == _MAX_FAILOVERS:
            raise error
        self.failovers.append("target hung" if isinstance(error, TargetHangs) else "target lost")
        self.log_new_leases(error)

    def log_new_leases(self, error: RapidError) -> None:
        """Log why the answer goes on with new leases."""
        logger.warning("request %s: new leases: %s", self.request.request_id, cause_of(error))

    def drop_drafter(self) -> None:
        """Remove what drafter and witness would have read, because no drafter is available."""
        self.prompts.pop("drafter", None)
        self.prompts.pop("witness", None)
        self.chunks, self.joined_query, self.passages = (), None, ()

    def lose_drafter(self, how: Failover, cause: object) -> None:
        """Continue every unfinished answer without a drafter.

        Args:
            how: The loss, for the receipt.
            cause: What has happened, for the error.

        Raises:
            DrafterUnavailable: The answer needs its drafter.
        """
        for answer in self.answers:
            if not answer.is_finished:
                self.lose_drafter_of(answer, how, cause)
        self.source = None

    def lose_drafter_of(self, answer: GrowingAnswer, how: Failover, cause: object) -> None:
        """Continue one answer without a drafter; arguments and errors are as for `lose_drafter`.

        All answers share the drafter, so only the first of them adds a failover to the receipt.
        """
        if self.needs_drafter:
            raise DrafterUnavailable(
                "The drafter was lost before the first token, and mode "
                f"{self.plan.mode!r} cannot do without one: {cause}"
            )
        if not self.has_lost_drafter:
            self.failovers.append(how)
        answer.statistics.lose_drafter(how)


def cause_of(error: BaseException) -> str:
    """Return an error's sentence for a log line, with what an engine of this process has raised.

    The errors of remote engines come without their cause, which is in the engine's own log.
    """
    return f"{error} ({error.__cause__!r})" if error.__cause__ else str(error)
