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
from collections.abc import AsyncGenerator
from contextlib import aclosing

from rapid.answering.readings import Readings
from rapid.answering.receipt.citing import cite
from rapid.answering.receipt.explaining import explain
from rapid.answering.receipt.receipts import receipt_of
from rapid.answering.request_leases import LOSSES, Leases
from rapid.answering.rounds import Rounds
from rapid.answering.run import Run
from rapid.answering.services import Services
from rapid.errors import DrafterHangs
from rapid.events import Finished, GenerationEvent, Started
from rapid.messages import GenerateRequest
from rapid.tracing import span


class RequestRun:
    """One request in run, from its chat to its receipt."""

    def __init__(
        self, services: Services, request: GenerateRequest, *, is_started: bool = False
    ) -> None:
        """Settle what does not depend on the text, and refuse what can never be answered.

        Args:
            services: What all requests of the process share.
            request: The request.
            is_started: Whether its response has begun with another part of it, so that it is not
                refused for want of room.

        Raises:
            BadRequest: The settings cannot be served.
            PromptTooLong: The answer alone would fill the context.
        """
        self._run = Run(services, request, is_started=is_started)
        self._readings = Readings(self._run)

    async def events(self) -> AsyncGenerator[GenerationEvent]:
        """Yield `Started`, then the deltas, then `Finished`.

        Before the deltas of a streamed answer, and after a failover among them, `Reading` says how
        far a prefill has come that takes longer than a second. Before `Started` it says so of the
        embedding of documents; until then all refusals that need no retrieval have been made.

        Raises:
            RapidError: The request was refused (before `Started`) or could not be completed.
        """
        run, readings = self._run, self._readings
        async with aclosing(readings.say_during(readings.read)) as said:
            async for news in said:
                yield news
        async with run.open_session() as session:
            leases = Leases(run, readings)
            rounds = Rounds(run, leases, readings)
            async with aclosing(readings.say_during(leases.take)) as said:
                async for news in said:
                    yield news
            assert run.decision is not None
            decision = run.decision
            run.is_started = True
            num_prompt = len(run.prompts.get(run.plan.role, ()))
            yield Started(
                decision.mode, decision.reason, decision.contract, decision.cause, num_prompt
            )
            while True:
                try:
                    async with aclosing(rounds.deltas(leases.verifier)) as deltas:
                        async for delta in deltas:
                            yield delta
                    break
                except DrafterHangs as error:  # at most once: no drafter is left afterwards
                    run.lose_drafter("drafter hung", error)
                    run.log_new_leases(error)
                except LOSSES as error:
                    run.lose_target(error)
                await session.release_all()
                with span("failover"):
                    await leases.take(asyncio.Event())
            citations = await cite(run, leases.verifier) if run.request.citations else None
            explanation = await explain(run) if run.request.explain else None
            used = await session.settle()
            yield Finished(receipt_of(run, used, citations, explanation))
