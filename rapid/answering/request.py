"""Processing of one request, from its chat to its receipt, on local or remote engines.

::

    target prompt ── target lease ── target prefill ─────────────────────┐
          └───────── retrieval ── mode ── draft source ── its prefill ───┴─ rounds ── receipt
                                                Started ┘

Every refusal comes before `Started`, when the leases are held and the mode is resolved; prefills
may continue after it. The leases are released however the generator ends. A target that is lost,
fails or hangs later is replaced: the request takes new leases, replays the committed tokens and
continues the same answer. A drafter that is lost or hangs is not replaced: the target continues
alone.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from hashlib import blake2b
from typing import Any

from rapid.answering.answers import GrowingAnswer, merged
from rapid.answering.prompting import DrafterPrompt
from rapid.answering.receipts import Record, receipt_of
from rapid.answering.resolution import (
    FUSING,
    Decision,
    Evidence,
    answer_tokens,
    check_blocks,
    check_lengths,
    check_refresh,
    decide,
    decide_lookup,
    sampling_of,
    speculation_of,
    without_drafter,
)
from rapid.answering.services import Services
from rapid.answering.session import DraftNeeds, DraftSource, Holding, Role, Session, Terms
from rapid.answering.sources import (
    CompanionSource,
    LookupSource,
    PoolSource,
    WitnessedSource,
)
from rapid.answering.tracing import span
from rapid.errors import (
    DrafterHangs,
    DrafterUnavailable,
    EngineFailed,
    LeaseNotFound,
    PromptTooLong,
    RapidError,
    TargetHangs,
    TargetUnavailable,
)
from rapid.messages import (
    Failover,
    Finished,
    GenerateRequest,
    GenerationEvent,
    Reading,
    Started,
    TextDelta,
    Verdict,
)
from rapid.ports import Drafter, Refresh
from rapid.speculation.controller import Controller
from rapid.speculation.refreshing import RefreshTrigger

logger = logging.getLogger(__name__)

_MAX_FAILOVERS = 2
_TARGETS_FAILOVERS: tuple[Failover, ...] = ("target lost", "target hung")
_LONG_CHARACTERS = 4096
_READING_S = 1.0
_HINTS: dict[Role, str] = {
    "target": " Shorten it, lower max_tokens, or use `mode: rag`, which reads only what retrieval "
    "finds in attached documents.",
    "drafter": " Lower rapid.retrieval_tokens or max_tokens.",
}
_HINT_OF_LOOKUP = " Shorten it or lower max_tokens."


class RequestRun:
    """One request in progress, from its chat to its receipt."""

    def __init__(self, services: Services, request: GenerateRequest) -> None:
        self._config, self._pools = services.config, services.pools
        self._prompts, self._patience = services.prompts, services.patience
        self._costs = services.costs
        self._request = request
        self._asked = request.speculation.mode
        self._looks_up = services.pools.drafter is None
        check_refresh(request, looks_up=self._looks_up)
        self._sampling = sampling_of(request)
        self._speculation = speculation_of(request, services.speculation, looks_up=self._looks_up)
        role: Role = "drafter" if self._asked == "rag" else "target"
        check_lengths(
            request,
            self._pools.max_context[role],
            self._pools.max_context["drafter"],
            hint=self._hint(role),
        )
        if not self._looks_up:
            check_blocks(request, self._speculation, self._prompts.vocab_size)
        self._record = Record()
        self._answers: list[GrowingAnswer] = []
        self._source: DraftSource | None = None
        self._resting: set[int] = set()  # choices whose rounds need the drafter no more
        self._trigger = RefreshTrigger()

    async def events(self) -> AsyncGenerator[GenerationEvent]:
        """Yield `Started`, then the deltas, then `Finished`.

        Before the deltas of a streamed answer, and after a failover among them, `Reading` says how
        far a prefill has come that takes longer than `_READING_S` seconds.

        Raises:
            RapidError: The request was refused (before `Started`) or could not be completed.
        """
        role: Role = "drafter" if self._asked == "rag" else "target"
        opened = await self._read(role)
        num_prompt = len(self._record.prompts[role])
        max_tokens = self._fit(role, num_prompt, self._request.max_tokens)
        async with Session(self._terms(max_tokens)) as session:
            decision, verifier = await self._open(session, role, opened)
            self._answers = [
                GrowingAnswer(choice, self._prompts.target, self._request.stop, max_tokens)
                for choice in range(self._request.num_choices)
            ]
            yield Started(decision.mode, decision.reason, decision.contract)
            while True:
                try:
                    async with aclosing(self._deltas(session, decision, verifier)) as deltas:
                        async for delta in deltas:
                            yield delta
                    break
                except DrafterHangs as error:  # at most once: no drafter is left afterwards
                    self._lose_drafter("drafter hung")
                    cause: RapidError = error
                except (TargetUnavailable, EngineFailed, LeaseNotFound) as error:
                    lost = [how for how in self._record.failovers if how in _TARGETS_FAILOVERS]
                    if len(lost) == _MAX_FAILOVERS:
                        raise
                    is_hung = isinstance(error, TargetHangs)
                    self._record.failovers.append("target hung" if is_hung else "target lost")
                    cause = error
                logger.warning("request %s: new leases: %s", self._request.request_id, cause)
                await session.release_all()
                with span("failover"):
                    verifier = await self._reopen(session, role)
            yield Finished(
                receipt_of(
                    self._request,
                    decision,
                    session.terms,
                    self._record,
                    session.timings_ms,
                    [answer.statistics for answer in self._answers],
                )
            )

    # --- opening: all refusals happen here --------------------------------------------------------

    async def _read(self, role: Role) -> Decision | None:
        """Build the verifier's prompt; return the decision, or None while it is open."""
        decision = decide_lookup(self._asked) if self._looks_up else None
        if role == "drafter":
            found = await self._found()
            await self._use(found)
            return decide(self._asked, found.evidence)
        with span("tokenize"):
            try:
                prompt_ids = await self._prompts.target_prompt(
                    self._request, self._pools.max_context[role]
                )
            except PromptTooLong as error:
                raise PromptTooLong(f"{error}{self._hint(role)}") from None
        self._record.prompts["target"] = prompt_ids
        return decide(self._asked, Evidence(0)) if self._asked == "plain" else decision

    async def _open(
        self, session: Session, role: Role, decision: Decision | None
    ) -> tuple[Decision, Holding]:
        """Take the leases and resolve the mode."""
        if decision is not None:
            if decision.is_drafted:
                self._source = LookupSource()
            verifier = await self._take_verifier(session, role)
            if self._source is not None:
                await self._source.hold(DraftNeeds(session, verifier, None))
            return decision, verifier
        self._source = self._model_source()
        finding = session.begin(self._found())
        verifier = await self._take_verifier(session, role)
        found = await finding
        decision = decide(self._asked, found.evidence)
        if decision.is_drafted:
            decision = await self._take_drafter(session, verifier, found, decision)
        if not decision.is_drafted:
            self._forgo_drafter(verifier)
        return decision, verifier

    async def _take_drafter(
        self, session: Session, verifier: Holding, found: DrafterPrompt, decision: Decision
    ) -> Decision:
        """Take the drafter's lease; return `decision`, or the fallback without a drafter.

        Raises:
            PromptTooLong: The mode is an explicit `fused` or `paper`, and the drafter's prompt does
                not fit.
            DrafterUnavailable: The mode is an explicit `fused` or `paper`, and no lease is
                available.
        """
        assert self._source is not None
        try:
            self._fit("drafter", len(found.prompt_ids), session.terms.max_tokens)
            await self._use(found)
            await self._hold_drafter(session, verifier)
        except PromptTooLong:
            if self._asked in FUSING:
                raise
            why = "what the drafter would read does not fit its context"
        except RapidError as error:
            if self._asked in FUSING:
                raise DrafterUnavailable(f"No drafter could be had: {error}") from None
            why = "no drafter could be had"
        else:
            return decision
        self._record.drop_drafter()
        return without_drafter(why)

    async def _reopen(self, session: Session, role: Role) -> Holding:
        """Take new leases, with the tokens that the answers have committed."""
        if self._has_lost_drafter():  # for one answer, and so for all: they share it
            self._lose_drafter("drafter lost")
        verifier = await self._take_verifier(session, role)
        if self._source is not None:
            try:
                await self._hold_drafter(session, verifier)
            except RapidError as error:
                logger.warning("request %s: no drafter again: %s", self._request.request_id, error)
                self._lose_drafter("drafter lost")
                verifier.lease.forgo_companion()
        return verifier

    async def _take_verifier(self, session: Session, role: Role) -> Holding:
        pool = self._pools.target if role == "target" else self._pools.alone
        assert pool is not None
        return await session.take(
            pool,
            role,
            self._record.prompts[role],
            timeout_s=self._config.target_wait_s,
            committed=self._committed(),
            log_odds=[answer.statistics.log_odds for answer in self._answers],
            companion_tokens=self._source.companion_tokens if self._source else 0,
        )

    async def _hold_drafter(self, session: Session, verifier: Holding) -> None:
        assert self._source is not None
        await self._source.hold(
            DraftNeeds(
                session,
                verifier,
                self._record.prompts.get("drafter"),
                self._config.drafter_wait_s,
                self._committed(),
                self._record.prompts.get("witness"),
            )
        )

    def _model_source(self) -> DraftSource:
        """Return the source of drafts for a drafter model: its own pool or the target's engine."""
        assert self._pools.drafter is not None
        if not self._pools.are_shared and not self._speculation.is_witnessed:
            return PoolSource(self._pools.drafter)
        num_target = len(self._record.prompts["target"])
        longest = self._prompts.longest_drafter_prompt(self._request, num_target)
        if self._pools.are_shared:  # the drafter's reading is the target's own
            return CompanionSource(self._pools.drafter, longest)
        return WitnessedSource(self._pools.drafter, self._pools.target, longest)

    def _terms(self, max_tokens: int) -> Terms:
        request = self._request
        return Terms(
            request.request_id,
            request.tenant,
            self._sampling,
            self._speculation,
            max_tokens,
            request.num_choices,
            request.num_logprobs,
            affinity_of(request),
            request.is_streamed,
            request.cache_salt,
        )

    def _fit(self, role: Role, num_prompt: int, max_tokens: int | None) -> int:
        """Return the longest answer, in tokens, that fits on an engine of this role.

        Raises:
            PromptTooLong: The prompt does not fit.
        """
        return answer_tokens(
            max_tokens,
            self._config.default_max_tokens,
            num_prompt,
            self._pools.max_context[role],
            hint=self._hint(role),
        )

    def _hint(self, role: Role) -> str:
        return _HINT_OF_LOOKUP if self._looks_up else _HINTS[role]

    async def _found(self, answer: str = "") -> DrafterPrompt:
        began = time.monotonic()
        with span("retrieval") as recorded:
            found = await self._prompts.drafter_prompt(self._request, answer)
            recorded.set_attribute("rapid.chunks", len(found.chunks))
        self._record.retrieval_ms += 1e3 * (time.monotonic() - began)
        return found

    async def _use(self, found: DrafterPrompt) -> None:
        self._record.prompts["drafter"] = found.prompt_ids
        self._record.chunks = found.chunks
        if isinstance(self._source, WitnessedSource):
            witness_ids = await self._prompts.witness_prompt(self._request, found)
            self._record.prompts["witness"] = witness_ids

    # --- rounds -----------------------------------------------------------------------------------

    async def _deltas(
        self, session: Session, decision: Decision, verifier: Holding
    ) -> AsyncGenerator[Reading | TextDelta]:
        """Wait for the prefills, then run the rounds of all unfinished choices."""
        if self._request.is_streamed:
            async with aclosing(self._readings(verifier)) as readings:
                async for reading in readings:
                    yield reading
        self._record.prefill = await verifier.prefill
        drafter_reads: asyncio.Task[None] | None = None
        if self._source is not None:
            drafter_reads = session.begin(self._read_by_drafter(self._source))
            if not self._can_rest(decision):
                await drafter_reads
        self._resting.clear()
        rounds = [
            answer.follow(self._verdicts(session, decision, verifier, answer, drafter_reads))
            for answer in self._answers
            if not answer.is_finished
        ]
        with self._costs.growing(len(rounds)):
            async with aclosing(merged(rounds)) as deltas:
                async for delta in deltas:
                    yield delta

    async def _readings(self, verifier: Holding) -> AsyncGenerator[Reading]:
        """Yield how far the verifier has read, every `_READING_S` seconds until it has read all.

        An engine that cannot say so costs nothing: if it is lost, its prefill fails and says why.
        """
        while not (await asyncio.wait({verifier.prefill}, timeout=_READING_S))[0]:
            try:
                num_read = await verifier.lease.num_read()
            except RapidError:
                continue
            yield Reading(num_read, len(verifier.prompt_ids))

    async def _read_by_drafter(self, source: DraftSource) -> None:
        """Wait for the drafter's prefill, at most as long as a round may take."""
        limit_s = self._patience.limit_s
        how: Failover
        try:
            async with asyncio.timeout(limit_s):
                await source.read()
            return
        except (TimeoutError, DrafterHangs):
            how, cause = "drafter hung", f"not read within {limit_s:g} s"
        except RapidError as error:
            how, cause = "drafter lost", str(error)
        logger.warning("request %s: no drafter: %s", self._request.request_id, cause)
        self._lose_drafter(how)
        await source.release()

    def _verdicts(
        self,
        session: Session,
        decision: Decision,
        verifier: Holding,
        answer: GrowingAnswer,
        drafter_reads: asyncio.Task[None] | None,
    ) -> AsyncIterator[Verdict]:
        """Run the rounds of one choice, after the tokens that its answer has committed."""
        committed = answer.statistics.token_ids
        return session.rounds(
            verifier,
            self._source,
            answer.choice,
            committed,
            pace=self._pace(session, decision, answer, drafter_reads) if drafter_reads else None,
            on_loss=functools.partial(self._note_loss, answer),
            refresh=self._refresh(session, verifier, answer),
            trigger=self._trigger,
        )

    def _refresh(
        self, session: Session, verifier: Holding, answer: GrowingAnswer
    ) -> Refresh | None:
        """Return the function that retrieves again for the drafter, or None if that is off."""
        if not self._request.speculation.refresh or not isinstance(self._source, PoolSource):
            return None
        return functools.partial(self._reread, session, verifier, answer, self._source)

    async def _reread(
        self,
        session: Session,
        verifier: Holding,
        answer: GrowingAnswer,
        source: PoolSource,
        _: tuple[int, ...],
    ) -> Drafter[Any]:
        """Retrieve with the question and the answer so far, and prefill the drafter again.

        Raises:
            DrafterUnavailable: Retrieval failed, or no lease is available for the new prompt.
        """
        token_ids = answer.statistics.token_ids
        found = await self._found(self._prompts.target.decode(token_ids))
        if found.evidence.is_lost:
            raise DrafterUnavailable(found.evidence.why_none)
        try:
            self._fit("drafter", len(found.prompt_ids), session.terms.max_tokens)
            await self._use(found)
            await self._hold_drafter(session, verifier)
            await source.read()
        except RapidError as error:
            raise DrafterUnavailable(f"The drafter cannot go on reading: {error}") from error
        answer.statistics.refreshes += 1
        return source.drafter(answer.choice, token_ids)

    def _is_paced(self, decision: Decision) -> bool:
        """Return whether draft lengths are chosen; otherwise each is `max_draft`.

        The rule `paper` has one length. A request with a seed under `maximal` coupling should be
        reproducible, but there the text would depend on when the drafter rests.
        """
        is_fixed = self._config.draft_length == "fixed" or decision.contract == "paper"
        is_seeded = self._request.seed is not None and self._sampling.temperature > 0
        return not (is_fixed or (is_seeded and self._speculation.coupling == "maximal"))

    def _can_rest(self, decision: Decision) -> bool:
        """Return whether rounds without the drafter change nothing."""
        return decision.contract == "target" and self._is_paced(decision)

    def _pace(
        self,
        session: Session,
        decision: Decision,
        answer: GrowingAnswer,
        drafter_reads: asyncio.Task[None],
    ) -> Controller | None:
        """Return the controller of an answer's draft lengths; None always drafts `max_draft`."""
        if not self._is_paced(decision):
            return None
        num_committed = len(answer.statistics.token_ids)
        return Controller(
            self._costs,
            len(self._record.prompts["target"]) + num_committed,
            self._speculation.max_draft,
            can_rest=self._can_rest(decision),
            num_left=session.terms.max_tokens - num_committed,
            is_read=lambda: drafter_reads.done() and self._source is not None,
            on_rest=functools.partial(self._rest, session, answer),
        )

    def _rest(self, session: Session, answer: GrowingAnswer) -> None:
        """Note that an answer rests for good; when all do, give the drafter's lease back."""
        self._resting.add(answer.choice)
        growing = {each.choice for each in self._answers if not each.is_finished}
        if self._source is not None and growing <= self._resting:
            session.begin(self._source.release())
            self._source = None

    # --- losing the drafter -----------------------------------------------------------------------

    def _forgo_drafter(self, verifier: Holding) -> None:
        """Remove the draft source before the first round and free the room kept for its lease."""
        if self._source is not None and self._source.companion_tokens:
            verifier.lease.forgo_companion()
        self._source = None

    def _committed(self) -> list[list[int]]:
        return [answer.statistics.token_ids for answer in self._answers]

    def _has_lost_drafter(self) -> bool:
        return any(answer.statistics.plain_from is not None for answer in self._answers)

    def _lose_drafter(self, how: Failover) -> None:
        """Continue every unfinished answer without a drafter."""
        for answer in self._answers:
            if not answer.is_finished:
                self._lose_drafter_of(answer, how)
        self._source = None

    def _note_loss(self, answer: GrowingAnswer, error: DrafterUnavailable) -> None:
        """Log the loss of one answer's drafter and continue without it."""
        logger.warning("request %s: no drafter any more: %s", self._request.request_id, error)
        self._lose_drafter_of(answer, "drafter lost")

    def _lose_drafter_of(self, answer: GrowingAnswer, how: Failover) -> None:
        """Record that the target continues one answer without a drafter.

        All answers share the drafter, so only the first of them adds a failover to the receipt.
        """
        if not self._has_lost_drafter():
            self._record.failovers.append(how)
        answer.statistics.lose_drafter(how)


def affinity_of(request: GenerateRequest) -> str:
    """Return a routing key for a request's long text: its documents, or a long first user message.

    Requests of one tenant with the same text have the same key, so a pool can send them to the
    replica that has already read it. The key is empty if there is no such text.
    """
    long = [document.text for document in request.documents]
    if not long:
        said = [message.content for message in request.messages if message.role == "user"]
        long = [text for text in said[:1] if len(text) >= _LONG_CHARACTERS]
    if not long:
        return ""
    content = "\0".join((request.tenant, *long))
    return blake2b(content.encode(), digest_size=16).hexdigest()
