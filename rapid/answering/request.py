"""Processing of one request, from its chat to its receipt, on local or remote engines.

::

    target prompt ── target lease ── target prefill ─────────────────────┐
          └───────── retrieval ── mode ── draft source ── its prefill ───┴─ rounds ── receipt
                                                Started ┘

Every refusal comes before `Started`, when the leases are held and the mode is resolved; prefills
may continue after it. The leases are released however the generator ends. A target that is lost,
fails or hangs is replaced, even before `Started`: the request takes new leases, replays the
committed tokens and continues the same answer. A drafter that is lost or hangs is not replaced: the
target continues alone. Before the first token, an explicit `fused` or `paper` ends with an error.

The parts are in modules of their own: what is read (`rapid.answering.readings`), the leases
(`rapid.answering.request_leases`) and the rounds on them (`rapid.answering.rounds`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from rapid.answering.answers import GrowingAnswer
from rapid.answering.decisions import Evidence, decide, decide_without_reader
from rapid.answering.readings import Readings
from rapid.answering.receipts import receipt_of
from rapid.answering.request_leases import Leases
from rapid.answering.request_plan import RequestPlan
from rapid.answering.rounds import Rounds, cause_of
from rapid.answering.run import Run
from rapid.answering.services import Services
from rapid.answering.session import Holding, Session
from rapid.answering.sources import choose
from rapid.errors import (
    DrafterHangs,
    EngineFailed,
    LeaseNotFound,
    RapidError,
    TargetHangs,
    TargetUnavailable,
)
from rapid.messages import Finished, GenerateRequest, GenerationEvent, Started, Terms
from rapid.receipt import Failover
from rapid.tracing import span

logger = logging.getLogger(__name__)

_MAX_FAILOVERS = 2  # targets that a request may lose; the next loss fails it
_TARGETS_FAILOVERS: tuple[Failover, ...] = ("target lost", "target hung")
_LOSSES = (TargetUnavailable, EngineFailed, LeaseNotFound)


class RequestRun:
    """One request in run, from its chat to its receipt."""

    def __init__(self, services: Services, request: GenerateRequest) -> None:
        """Settle what does not depend on the text, and refuse what can never be answered.

        Args:
            services: What all requests of the process share.
            request: The request.

        Raises:
            BadRequest: The settings cannot be served.
            PromptTooLong: The answer alone would fill the context.
        """
        plan = RequestPlan.of(
            request,
            services.speculation,
            services.pools.max_context,
            services.config.default_max_tokens,
            own_drafting=services.pools.own_drafting,
            vocab_size=services.prompts.vocab_size,
        )
        self._run = Run(services, request, plan)
        self._readings = Readings(self._run)

    async def events(self) -> AsyncGenerator[GenerationEvent]:
        """Yield `Started`, then the deltas, then `Finished`.

        Before the deltas of a streamed answer, and after a failover among them, `Reading` says how
        far a prefill has come that takes longer than a second. Before `Started` it says so of the
        embedding of documents; until then all refusals that need no retrieval have been made.

        Raises:
            RapidError: The request was refused (before `Started`) or could not be completed.
        """
        run = self._run
        reads_first = asyncio.Event()  # the mode is an explicit `rag`
        reading = asyncio.create_task(self._read(reads_first))
        async with aclosing(self._readings.say_until(reading, reads_first)) as said:
            async for news in said:
                yield news
        await reading
        async with Session(self._terms()) as session:
            run.session = session
            leases = Leases(run, self._readings)
            rounds = Rounds(run, leases, self._readings)
            self._begin_answers(session.terms.max_tokens)
            has_room = asyncio.Event()
            taking = asyncio.create_task(self._take(leases, has_room))
            async with aclosing(self._readings.say_until(taking, has_room)) as said:
                async for news in said:
                    yield news
            verifier = await taking
            assert run.decision is not None
            decision = run.decision
            run.is_started = True
            yield Started(decision.mode, decision.reason, decision.contract, decision.cause)
            while True:
                try:
                    async with aclosing(rounds.deltas(verifier)) as deltas:
                        async for delta in deltas:
                            yield delta
                    break
                except DrafterHangs as error:  # at most once: no drafter is left afterwards
                    run.lose_drafter("drafter hung", error)
                    self._log_new_leases(error)
                except _LOSSES as error:
                    self._lose_target(error)
                await session.release_all()
                with span("failover"):
                    verifier = await self._take(leases)
            yield Finished(receipt_of(run))

    async def _read(self, begins: asyncio.Event) -> None:
        """Build the prompt of the model that answers, and resolve the mode where that needs it.

        `begins` is set before retrieval, if the mode needs it first.
        """
        run, readings, asked = self._run, self._readings, self._run.plan.mode
        if asked == "plain":
            run.decision = decide(asked, Evidence(0))
        elif own_drafting := run.plan.own_drafting:
            run.decision = decide_without_reader(asked, own_drafting)
            run.source = choose(own_drafting, run.services.pools.target)
        elif asked == "rag":
            begins.set()
            found = await readings.find()
            await readings.use(found)
            run.decision = decide(asked, found.evidence)
        if run.plan.role == "target":
            await readings.render_chat()

    def _terms(self) -> Terms:
        """Return the settings that all leases share.

        Raises:
            PromptTooLong: The prompt with its answer does not fit the context.
        """
        request, plan = self._run.request, self._run.plan
        num_prompt = len(self._run.prompts[plan.role])
        return Terms(
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

    def _begin_answers(self, max_tokens: int) -> None:
        request, text = self._run.request, self._run.services.prompts.target
        self._run.answers = [
            GrowingAnswer(choice, text, request.stop, max_tokens)
            for choice in range(request.num_choices)
        ]

    async def _take(self, leases: Leases, has_room: asyncio.Event | None = None) -> Holding:
        """Take the leases; a target that is lost before the drafter's is held is replaced.

        `has_room` is set when the target's lease is held, and retrieval is waited for.
        """
        while True:
            verifier = await leases.take_verifier()
            if has_room is not None:
                has_room.set()
            try:
                await leases.take_drafter(verifier)
                return verifier
            except _LOSSES as error:
                self._lose_target(error)
            await self._run.session.release_all()

    def _lose_target(self, error: RapidError) -> None:
        """Note that the target is lost, and why; raise `error` if it was not the first ones."""
        failovers = self._run.failovers
        if sum(how in _TARGETS_FAILOVERS for how in failovers) == _MAX_FAILOVERS:
            raise error
        failovers.append("target hung" if isinstance(error, TargetHangs) else "target lost")
        self._log_new_leases(error)

    def _log_new_leases(self, error: RapidError) -> None:
        request_id = self._run.request.request_id
        logger.warning("request %s: new leases: %s", request_id, cause_of(error))
