"""The life of one request: prompts, leases, retrieval, rounds, receipt.

::

    target prompt ── target lease ── target prefill ────────────────────┐
          └───────── retrieval ── mode ── drafter lease ── its prefill ─┴─ rounds ── receipt
                                               Started ┘

What can be refused is refused before `Started`: then the leases are held and the mode is settled.
Prefills may go on after it. Whatever ends the generator, the leases are released. An engine that
dies later is replaced: new leases, the committed tokens replayed, the same answer continued. A
drafter that dies or hangs is not: the target goes on alone.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field

from ray.serve.handle import DeploymentHandle

from deployments.config.serve_config import ServeConfig
from deployments.orchestrator.leasing import Leasing, Role, Side, background
from deployments.orchestrator.ray_ports import JudgingVerifier, Patience, RayDrafter, RayVerifier
from rapid.answering.answers import Answer, merged
from rapid.answering.prompting import DrafterPrompt, Prompter
from rapid.answering.receipts import Account
from rapid.answering.resolution import (
    FUSING,
    Decision,
    Evidence,
    decide,
    decide_lookup,
    sampling_of,
    speculation_of,
    without_drafter,
)
from rapid.errors import (
    DrafterHangs,
    DrafterUnavailable,
    LeaseNotFound,
    PromptTooLong,
    RapidError,
    TargetUnavailable,
)
from rapid.messages import (
    Failover,
    Finished,
    GenerateRequest,
    GenerationEvent,
    Int32Array,
    Started,
    TextDelta,
    Verdict,
)
from rapid.speculation.controller import Controller, RoundCosts
from rapid.speculation.lookup import PromptIndex, PromptLookupDrafter
from rapid.speculation.loop import speculate

logger = logging.getLogger(__name__)

_MAX_FAILOVERS = 2


@dataclass(frozen=True, slots=True)
class Services:
    """What all requests share."""

    config: ServeConfig
    handles: dict[Role, DeploymentHandle]
    prompter: Prompter
    patience: Patience
    costs: RoundCosts = field(default_factory=RoundCosts)


@dataclass(frozen=True, slots=True)
class Opened:
    """What a request holds; in `rag` the verifier is an engine of the drafter pool."""

    verifier: Side
    drafter: Side | None = None


class Generation:
    """One request from its prompt to its receipt."""

    def __init__(self, services: Services, request: GenerateRequest) -> None:
        self._settings = services.config.orchestrator
        self._is_shared = services.config.drafter == "target"
        self._looks_up = services.config.drafter == "prompt_lookup"
        self._prompter = services.prompter
        self._patience = services.patience
        self._costs = services.costs
        self._request = request
        self._sampling = sampling_of(request)
        self._speculation = speculation_of(
            request, services.config.speculation, looks_up=self._looks_up
        )
        self._account = Account()
        self._leasing = Leasing(
            services.config,
            services.handles,
            request,
            self._sampling,
            self._speculation,
            self._account,
        )
        self._max_tokens = 0
        self._answers: list[Answer] = []
        self._index: PromptIndex | None = None

    async def events(self) -> AsyncGenerator[GenerationEvent]:
        """`Started`, the deltas, `Finished`.

        Raises:
            RapidError: before `Started` the request was refused; after it, it could not go on.
        """
        async with AsyncExitStack() as held:
            decision, opened = await self._open(held)
            self._answers = [
                Answer(choice, self._prompter.target, self._request.stop, self._max_tokens)
                for choice in range(self._request.num_choices)
            ]
            yield Started(decision.mode, decision.reason, decision.contract)
            while True:
                try:
                    async with aclosing(self._deltas(decision, opened)) as deltas:
                        async for delta in deltas:
                            yield delta
                    break
                except DrafterHangs as error:  # once: it is gone then
                    self._lose_drafter("drafter hung")
                    told: RapidError = error
                except (TargetUnavailable, LeaseNotFound) as error:
                    if self._account.failovers.count("target lost") == _MAX_FAILOVERS:
                        raise
                    self._account.failovers.append("target lost")
                    told = error
                logger.warning("request %s: new leases: %s", self._request.request_id, told)
                await held.aclose()
                opened = await self._reopen(held, decision)
            yield Finished(
                self._account.receipt(
                    self._request, decision, self._sampling, self._speculation, self._answers
                )
            )

    async def _open(self, held: AsyncExitStack) -> tuple[Decision, Opened]:
        """Take the leases and settle the mode; all that can be refused is refused here."""
        asked = self._request.speculation.mode
        if self._looks_up:
            return await self._open_lookup(held, decide_lookup(asked))
        if asked == "rag":
            prompt = await self._read()
            self._use(prompt)
            self._max_tokens = self._leasing.fit(
                "drafter", len(prompt.prompt_ids), self._request.max_tokens
            )
            return decide(asked, prompt.evidence), Opened(await self._take("drafter", held))

        await self._read_target()
        reading = background(held, self._read()) if asked != "plain" else None
        verifier = await self._take("target", held, may_draft=reading is not None)
        if reading is None:
            return decide(asked, Evidence(0)), Opened(verifier)
        prompt = await reading
        decision = decide(asked, prompt.evidence)
        if not decision.is_drafted:
            self._forgo_drafter(verifier)
            return decision, Opened(verifier)
        try:
            self._leasing.fit("drafter", len(prompt.prompt_ids), self._max_tokens)
            self._use(prompt)
            return decision, Opened(verifier, await self._take("drafter", held, verifier))
        except PromptTooLong:
            if asked in FUSING:
                raise
            why = "what the drafter would read does not fit its context"
        except RapidError as error:
            if asked in FUSING:
                raise DrafterUnavailable(f"No drafter could be had: {error}") from None
            why = "no drafter could be had"
        self._account.drop_drafter()
        self._forgo_drafter(verifier)
        return without_drafter(why), Opened(verifier)

    async def _open_lookup(
        self, held: AsyncExitStack, decision: Decision
    ) -> tuple[Decision, Opened]:
        """A target lease is all that prompt lookup needs."""
        prompt_ids = await self._read_target()
        verifier = await self._take("target", held)
        if decision.mode != "plain":
            self._index = await asyncio.to_thread(PromptIndex, prompt_ids)
        return decision, Opened(verifier)

    async def _read_target(self) -> Int32Array:
        """The target's prompt, which fits with its answer."""
        prompt_ids = await self._prompter.target_prompt(self._request)
        self._account.prompts["target"] = prompt_ids
        self._max_tokens = self._leasing.fit("target", len(prompt_ids), self._request.max_tokens)
        return prompt_ids

    async def _reopen(self, held: AsyncExitStack, decision: Decision) -> Opened:
        """New leases that continue where the answers stand."""
        if decision.mode == "rag":
            return Opened(await self._take("drafter", held))
        is_drafted = decision.is_drafted and not self._has_lost_drafter()
        verifier = await self._take("target", held, may_draft=is_drafted)
        if not is_drafted:
            return Opened(verifier)
        try:
            return Opened(verifier, await self._take("drafter", held, verifier))
        except RapidError as error:
            logger.warning("request %s: no drafter again: %s", self._request.request_id, error)
            self._lose_drafter("drafter lost")
            self._forgo_drafter(verifier)
            return Opened(verifier)

    async def _take(
        self,
        role: Role,
        held: AsyncExitStack,
        verifier: Side | None = None,
        *,
        may_draft: bool = False,
    ) -> Side:
        """A lease.

        Args:
            role: the pool to ask.
            held: what the lease hangs on.
            verifier: given for the drafter that is to help it.
            may_draft: a drafter's lease may follow this one.
        """
        settings = self._settings
        prompt_ids = self._account.prompts[role]
        companion_tokens = 0
        if self._is_shared and may_draft:
            companion_tokens = self._prompter.longest_drafter_prompt(self._request, prompt_ids)
        return await self._leasing.take(
            held,
            role,
            prompt_ids,
            self._max_tokens,
            timeout_s=settings.drafter_wait_s if verifier else settings.target_wait_s,
            committed=tuple(tuple(each.statistics.token_ids) for each in self._answers),
            companion_tokens=companion_tokens,
            first=verifier.lease if verifier and self._is_shared else None,
        )

    def _forgo_drafter(self, verifier: Side) -> None:
        """No drafter's lease will come: an engine that drafts for itself need keep no room for it.

        Nothing waits for the call: without it the room comes back with the lease.
        """
        if self._is_shared:
            verifier.lease.engine.forgo_companion.remote(verifier.lease.lease_id)

    def _has_lost_drafter(self) -> bool:
        return any(answer.statistics.plain_from is not None for answer in self._answers)

    def _lose_drafter(self, how: Failover) -> None:
        """What is left of every answer is the target's."""
        for answer in self._answers:
            if not answer.is_finished:
                self._lose_drafter_of(answer, how)

    def _lose_drafter_of(self, answer: Answer, how: Failover) -> None:
        """All choices have one drafter, which is lost once."""
        if not self._has_lost_drafter():
            self._account.failovers.append(how)
        answer.statistics.lose_drafter(how)

    def _note_loss(self, answer: Answer, error: DrafterUnavailable) -> None:
        """One answer goes on without its drafter; the log says why."""
        logger.warning("request %s: no drafter any more: %s", self._request.request_id, error)
        self._lose_drafter_of(answer, "drafter lost")

    async def _read(self) -> DrafterPrompt:
        started = time.monotonic()
        prompt = await self._prompter.drafter_prompt(self._request)
        self._account.timings_ms["retrieval"] = 1e3 * (time.monotonic() - started)
        return prompt

    def _use(self, prompt: DrafterPrompt) -> None:
        self._account.prompts["drafter"] = prompt.prompt_ids
        self._account.chunks = prompt.chunks

    async def _deltas(self, decision: Decision, opened: Opened) -> AsyncGenerator[TextDelta]:
        """The rounds of all choices that are not finished."""
        self._account.prefill = await opened.verifier.prefill
        drafter = opened.drafter
        if drafter is not None:
            limit_s = self._patience.limit_s
            try:
                async with asyncio.timeout(limit_s):
                    await drafter.prefill
            except (TimeoutError, RapidError) as error:
                told = error if isinstance(error, RapidError) else f"not read within {limit_s:g} s"
                logger.warning("request %s: no drafter: %s", self._request.request_id, told)
                hangs = isinstance(error, TimeoutError)
                self._lose_drafter("drafter hung" if hangs else "drafter lost")
                await drafter.hold.aclose()
                drafter = None
        rounds = [
            answer.follow(self._verdicts(decision, answer, opened.verifier, drafter))
            for answer in self._answers
            if not answer.is_finished
        ]
        with self._costs.growing(len(rounds)):
            async with aclosing(merged(rounds)) as deltas:
                async for delta in deltas:
                    yield delta

    def _verdicts(
        self, decision: Decision, answer: Answer, verifier: Side, drafter: Side | None
    ) -> AsyncIterator[Verdict]:
        """The loop of one choice, from where its answer stands."""
        lease = drafter.lease if drafter else None
        judge = RayVerifier(verifier.lease, lease, self._patience, answer.choice)
        if self._settings.acceptance_site == "orchestrator":
            judge = JudgingVerifier(
                verifier.lease,
                lease,
                self._patience,
                answer.choice,
                self._sampling,
                self._speculation,
                self._prompter.target.eos_ids,
                self._request.num_logprobs,
            )
        committed = answer.statistics.token_ids
        port: RayDrafter | PromptLookupDrafter | None = None
        if self._index is not None:
            port = PromptLookupDrafter(self._index, answer.choice, committed)
        elif lease is not None:
            port = RayDrafter(lease, answer.choice)
        return speculate(
            port,
            judge,
            max_tokens=self._max_tokens - len(committed),
            max_draft=self._speculation.max_draft,
            is_streamed=self._request.is_streamed,
            pace=self._pace(decision, len(committed)) if port is not None else None,
            on_loss=functools.partial(self._note_loss, answer),
        )

    def _pace(self, decision: Decision, num_committed: int) -> Controller | None:
        """What chooses the draft lengths of an answer that is drafted; None for `max_draft` always.

        The rule `paper` has one length. And whoever sends a seed and asks for `maximal` coupling
        wants the same text again, which would then depend on when a drafter rests.
        """
        is_fixed = self._settings.draft_length == "fixed" or decision.contract == "paper"
        is_seeded = self._request.seed is not None and self._sampling.temperature > 0
        if is_fixed or (is_seeded and self._speculation.coupling == "maximal"):
            return None
        return Controller(
            self._costs,
            len(self._account.prompts["target"]) + num_committed,
            self._speculation.max_draft,
            can_rest=decision.contract == "target",
        )
