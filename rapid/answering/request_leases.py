"""The leases of one request: taken, taken again after a loss, and given back.

::

    verifier's lease ── its prefill ─────────────────────────────
          └── retrieval ── mode ── drafter's lease ── its prefill

A drafter's lease may be taken on the verifier's own engine, or wait for long elsewhere. If the
verifier's lease is lost meanwhile, that is the error which is raised: the request needs a new one,
and nothing is wrong with its drafter.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from rapid.answering.leases.document_keys import affinity_of
from rapid.answering.leases.session import DraftNeeds, Holding
from rapid.answering.leases.sources import choose
from rapid.answering.mode.answerable import read_log_odds, terms_of
from rapid.answering.mode.decisions import FUSING, Decision, decide_by_reading, without_drafter
from rapid.answering.prompt.prompting import DrafterPrompt
from rapid.answering.readings import Readings
from rapid.answering.run import Run
from rapid.config import OwnDrafting
from rapid.errors import (
    DrafterUnavailable,
    EngineFailed,
    LeaseNotFound,
    Overloaded,
    PromptTooLong,
    RapidError,
    TargetUnavailable,
)
from rapid.receipt import Cause

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_LOOK_EVERY_S = 2.0  # between two looks at the target while the drafter's lease waits
LOSSES = (TargetUnavailable, EngineFailed, LeaseNotFound)  # of the verifier's lease or engine
_BEGUN_WAIT_S = 600.0  # of an answer that has begun, for another target: its model may be loading


class Leases:
    """Taking of the leases of one request, on which its answers are generated.

    Attributes:
        verifier: The lease that judges, once it is taken.
    """

    verifier: Holding

    def __init__(self, run: Run, readings: Readings) -> None:
        """Store the run, whose session is open and whose prompt of the model that answers is there.

        Args:
            run: The request's run; its mode is resolved when the drafter's lease is taken.
            readings: Its prompts.
        """
        services = run.services
        self._config, self._pools = services.config, services.pools
        self._patience, self._prompts = services.patience, services.prompts
        self._request, self._plan = run.request, run.plan
        self._run, self._session, self._readings = run, run.session, readings
        self._finding: asyncio.Task[tuple[Decision, DrafterPrompt]] | None = None

    async def take(self, has_room: asyncio.Event) -> None:
        """Take the leases; a target that is lost before the drafter's is held is replaced.

        `has_room` is set when the target's lease is held, and retrieval is waited for.

        Raises:
            RapidError: As for `take_verifier` and `take_drafter`, or too many targets were lost.
        """
        while True:
            self.verifier = await self.take_verifier()
            has_room.set()
            try:
                await self.take_drafter(self.verifier)
                return
            except LOSSES as error:
                self._run.lose_target(error)
            await self._session.release_all()

    async def take_verifier(self) -> Holding:
        """Take the lease of the model that answers, with the tokens committed so far.

        If the mode depends on what can be retrieved, retrieval begins.

        An answer that has begun waits for as long as an engine may take to load: nothing is worth
        less to its client than an answer without its end.

        Raises:
            Overloaded: There was no room in time.
            RapidError: The pool cannot be reached, or it refused the prompt.
        """
        run, session = self._run, self._session
        if run.has_lost_drafter:  # for one answer, and so for all: they share it
            run.lose_drafter("drafter lost", "it was lost for another choice")
        if run.decision is None and self._finding is None:
            num_target = len(run.prompts["target"])
            run.source = choose(
                self._pools.drafter,
                self._pools.target,
                short_tokens=self._prompts.longest_drafter_prompt(self._request, num_target),
                is_witnessed=session.terms.speculation.is_witnessed,
            )
            self._finding = session.begin(self._readings.resolve())
        role = self._plan.role
        pool = self._pools.target if role == "target" else self._pools.alone
        committed = run.committed
        wait_s = self._config.target_wait_s
        return await session.take(
            pool,
            role,
            run.prompts[role],
            timeout_s=max(wait_s, _BEGUN_WAIT_S) if run.has_begun else wait_s,
            committed=committed,
            log_odds=[each.statistics.log_odds for each in run.answers if committed],
            companion_tokens=run.source.companion_tokens if run.source else 0,
            affinity=affinity_of(self._request) if role == "target" else "",
            scored_from=run.scored_from,
        )

    async def take_drafter(self, verifier: Holding) -> None:
        """Resolve the mode if it is open, and take the leases that drafting needs.

        Once the mode is resolved, answers whose drafter cannot be had again go on without it.

        Raises:
            PromptTooLong: The mode is an explicit `fused` or `paper`, and the drafter's prompt does
                not fit.
            DrafterUnavailable: The mode is an explicit `fused` or `paper`, and no drafter lives.
            Overloaded: The mode is an explicit `fused` or `paper`, and drafters have no room.
            RapidError: The verifier's lease was lost.
        """
        run = self._run
        if run.decision is None:
            run.decision = await self._decide(verifier)
            if not run.decision.is_drafted:
                self._forgo_drafter(verifier)
        elif run.source is not None:
            try:
                await self.hold_drafter(verifier)
            except (DrafterUnavailable, Overloaded, PromptTooLong) as error:
                if run.needs_drafter:
                    raise
                logger.warning("request %s: no drafter again: %s", self._request.request_id, error)
                self._forgo_drafter(verifier)
                run.lose_drafter("drafter lost", error)

    async def hold_drafter(self, verifier: Holding) -> None:
        """Take the leases that drafting needs, and look meanwhile whether the verifier's lives.

        Raises:
            PromptTooLong: The drafter's engine refused the prompt as too long.
            DrafterUnavailable: No drafter can be reached.
            Overloaded: Drafters have no room; the error says when to try again.
            RapidError: The verifier's lease was lost.
        """
        run = self._run
        assert run.source is not None
        prompts = run.prompts
        needs = DraftNeeds(
            self._session,
            verifier,
            prompts.get("drafter"),
            self._config.drafter_wait_s,
            run.committed,
            prompts.get("witness"),
            run.passages,
        )
        await self._await_beside(verifier, run.source.hold(needs))

    async def _await_beside(self, verifier: Holding, work: Coroutine[Any, Any, Result]) -> Result:
        """Await work on a drafter, and look meanwhile whether the verifier's lease lives.

        Raises:
            RapidError: As for `hold_drafter`.
        """
        task = self._session.begin(work)
        while not (await asyncio.wait({task}, timeout=_LOOK_EVERY_S))[0]:
            await verifier.check()
        try:
            return task.result()
        except (TargetUnavailable, PromptTooLong):
            raise
        except RapidError as error:
            await verifier.check()
            raise _refusal(error) from None

    async def _decide(self, verifier: Holding) -> Decision:
        """Resolve the mode, with the drafter's lease if it drafts; fall back to `plain` or refuse.

        Raises:
            RapidError: As for `take_drafter`.
        """
        assert self._finding is not None
        least = self._config.answerable_log_odds
        try:
            decision, found = await self._finding
            if decision.is_drafted and self._plan.mode == "auto" and least is not None:
                log_odds = await self._await_beside(verifier, self._answerable(verifier, found))
                decision = decide_by_reading(log_odds, least)
            if decision.is_drafted:
                await self.hold_drafter(verifier)
        except PromptTooLong:
            if self._plan.mode in FUSING:
                raise
            cause: Cause = "drafter's prompt too long"
            decision = without_drafter(cause, by_text=self._run.drafts_from_text)
        except (DrafterUnavailable, Overloaded) as error:
            if self._plan.mode in FUSING:
                raise
            logger.info("request %s: %s", self._request.request_id, error)
            decision = without_drafter("no drafter", by_text=self._run.drafts_from_text)
        if not decision.is_drafted:
            self._run.drop_drafter()
        return decision

    async def _answerable(self, verifier: Holding, found: DrafterPrompt) -> float:
        """Ask the drafter whether what was found answers the question; return its log odds.

        Its lease for drafting finds the text read.

        Raises:
            DrafterUnavailable: It cannot be reached, or gave no word in time.
            RapidError: It has no room, or the verifier's engine, which drafts, was lost.
        """
        pool, session, source = self._pools.drafter, self._session, self._run.source
        assert not isinstance(pool, OwnDrafting)
        assert source is not None
        is_targets = pool is self._pools.target
        held = await session.take(
            pool,
            "drafter",
            await self._prompts.answerable_prompt(self._request, found),
            timeout_s=self._config.drafter_wait_s,
            beside=verifier if is_targets else None,
            companion_tokens=source.companion_tokens if is_targets else 0,
            terms=terms_of(session.terms),
        )
        limit_s = self._patience.limit_s
        try:
            async with asyncio.timeout(limit_s):
                return await read_log_odds(held, self._prompts.drafter.decode)
        except TimeoutError:
            raise DrafterUnavailable(f"it gave no word within {limit_s:g} s") from None
        except TargetUnavailable as error:  # said of the engine that decodes
            if is_targets:
                raise
            raise DrafterUnavailable(str(error)) from error
        finally:
            await held.release()

    def _forgo_drafter(self, verifier: Holding) -> None:
        """Remove the draft source and free the room that was kept for its lease."""
        source = self._run.source
        if source is not None and source.companion_tokens:
            verifier.lease.forgo_companion()
        self._run.source = None


def _refusal(error: RapidError) -> RapidError:
    """Return the error for a request whose drafter cannot be had because of `error`."""
    message = f"No drafter could be had: {error}"
    if isinstance(error, Overloaded):
        return type(error)(message, error.retry_after_s)
    return DrafterUnavailable(message)
