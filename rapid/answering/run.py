"""One request while it runs: what it has held, read, answered and lost so far."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from rapid.answering.answers import GrowingAnswer
from rapid.answering.decisions import FUSING, Decision, without_drafter
from rapid.answering.request_plan import RequestPlan
from rapid.answering.services import Services
from rapid.answering.session import DraftSource, Role, Session
from rapid.errors import DrafterUnavailable, RapidError, TargetHangs
from rapid.messages import GenerateRequest, Int32Array, PrefillReceipt, Terms
from rapid.ports import Passage
from rapid.receipt import Failover

logger = logging.getLogger(__name__)

_MAX_FAILOVERS = 2  # targets that a request may lose; the next loss fails it
_TARGETS_FAILOVERS: tuple[Failover, ...] = ("target lost", "target hung")


@dataclass(slots=True)
class Run:
    """The state of one request: its fixed plan, and all that changes while it is answered.

    Attributes:
        session: The leases that it holds; set once the prompt of the model that answers is known.
        decision: The resolved mode; None while it is open.
        source: Source of the drafts; None if the answers are not drafted, or no longer.
        answers: The answers, one for each choice.
        is_started: Whether the first leases were held and the response may have begun.
        prompts: Prompts of target, drafter and witness, by role.
        chunks: Retrieved chunks in the drafter's prompt.
        prefill: Prefill receipt of the model that answers.
        failovers: Failures after which the answer was continued, in order.
        retrieval_ms: Milliseconds spent on retrieval.
    """

    services: Services
    request: GenerateRequest
    plan: RequestPlan
    session: Session = field(init=False, repr=False)
    decision: Decision | None = None
    source: DraftSource | None = None
    answers: list[GrowingAnswer] = field(default_factory=list)
    is_started: bool = False
    prompts: dict[Role, Int32Array] = field(default_factory=dict)
    chunks: tuple[Passage, ...] = ()
    prefill: PrefillReceipt | None = None
    failovers: list[Failover] = field(default_factory=list)
    retrieval_ms: float = 0.0

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
    def has_lost_drafter(self) -> bool:
        """Whether an answer goes on without its drafter."""
        return any(answer.statistics.plain_from is not None for answer in self.answers)

    @property
    def needs_drafter(self) -> bool:
        """Whether an answer without the drafter would have nothing of what was asked for."""
        has_tokens = any(answer.statistics.token_ids for answer in self.answers)
        return self.plan.mode in FUSING and not has_tokens

    @property
    def outcome(self) -> Decision:
        """The mode, reason and contract of the receipt.

        They are those of the decision, unless the answers have lost their drafter before the first
        token, and so are all the target's own.
        """
        assert self.decision is not None
        is_plain = all(answer.statistics.plain_from == 0 for answer in self.answers)
        if self.decision.is_drafted and is_plain:
            return without_drafter("drafter lost", at_start=False)
        return self.decision

    def open_session(self) -> Session:
        """Begin the answers, and return the session of their leases.

        Raises:
            PromptTooLong: The prompt with its answer does not fit the context.
        """
        request, plan = self.request, self.plan
        num_prompt = len(self.prompts[plan.role])
        terms = Terms(
            request.tenant,
            plan.sampling,
            plan.speculation,
            plan.fit(plan.role, num_prompt, request.max_tokens),
            request.num_choices,
            request.num_logprobs,
            request.cache_salt,
            request.is_streamed,
            request.request_id,
        )
        text = self.services.prompts.target
        self.answers = [
            GrowingAnswer(choice, text, request.stop, terms.max_tokens)
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
        self.chunks = ()

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
