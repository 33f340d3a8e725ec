"""The rounds of one request on its leases: the prefills before them, and the deltas they make."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

from rapid.answering.answers import GrowingAnswer, merge_answers, spell
from rapid.answering.leases.session import DraftNeeds, DraftSource, Holding
from rapid.answering.leases.sources import LookupSource, PoolSource, Rereading, WitnessedSource
from rapid.answering.prompt.prompting import DrafterPrompt
from rapid.answering.readings import Readings
from rapid.answering.request_leases import Leases
from rapid.answering.run import Run, cause_of
from rapid.chat_messages import Document
from rapid.errors import (
    DrafterHangs,
    DrafterUnavailable,
    EngineFailed,
    RapidError,
    TargetUnavailable,
)
from rapid.events import ChoiceDelta, Reading, TokenText
from rapid.messages import Verdict
from rapid.ports import Refresh
from rapid.receipt import Failover
from rapid.speculation.pace.controller import Controller
from rapid.speculation.pace.copying import TextController
from rapid.speculation.pace.refreshing import RefreshTrigger
from rapid.speculation.relay import Relay

logger = logging.getLogger(__name__)

_READING_S = 1.0  # between two reports of how far a streamed answer's document is read


class Rounds:
    """The rounds of all choices of one request, on the leases that it holds now."""

    def __init__(self, run: Run, leases: Leases, readings: Readings) -> None:
        services = run.services
        self._config, self._prompts = services.config, services.prompts
        self._patience = services.patience
        self._costs, self._text_costs = services.costs, services.text_costs
        self._request, self._session = run.request, run.session
        self._run, self._leases, self._readings = run, leases, readings
        self._resting: set[int] = set()  # choices whose rounds need the drafter no more
        self._trigger = RefreshTrigger()

    async def deltas(self, verifier: Holding) -> AsyncGenerator[Reading | ChoiceDelta]:
        """Wait for the prefills, then run the rounds of all unfinished choices.

        Args:
            verifier: The lease that judges, just taken.

        Raises:
            DrafterHangs: A block has not come in time; both leases are to be given up.
            RapidError: The verifier's lease or engine is lost, or there is a bug.
        """
        run = self._run
        indexing = self._session.begin(self._index_text(verifier))
        if self._request.is_streamed:
            async with aclosing(self._progress_of_reading(verifier)) as readings:
                async for reading in readings:
                    yield reading
        run.prefill = await verifier.prefill
        if self._request.echoes_prompt or self._request.max_tokens == 0:
            if not run.has_told_prompt:
                text, logprobs = await self._prompts.read(self._request, spell_prompt, run)
                run.has_told_prompt = True
                for answer in run.answers:
                    yield answer.tell_prompt(text, logprobs, is_all=self._request.max_tokens == 0)
            if self._request.max_tokens == 0:
                return
        await indexing
        drafter_reads: asyncio.Task[None] | None = None
        if run.source is not None:
            drafter_reads = self._session.begin(self._read_by_drafter(run.source, verifier))
            if not self._can_rest:
                await drafter_reads
        self._resting.clear()
        rounds = [
            answer.follow(self._verdicts(verifier, answer, drafter_reads))
            for answer in run.answers
            if not answer.is_finished
        ]
        num_rounds = len(rounds)
        with self._costs.growing(num_rounds), self._text_costs.growing(num_rounds):
            async with aclosing(merge_answers(rounds)) as deltas:
                async for delta in deltas:
                    yield delta

    async def _progress_of_reading(self, verifier: Holding) -> AsyncGenerator[Reading]:
        """Yield how far the verifier has read, every `_READING_S` seconds until it has read all.

        Once it has, what it found in a cache is told, unless that is nothing.

        An engine that cannot say so costs nothing: if it is lost, its prefill fails and says why.
        """
        while not (await asyncio.wait({verifier.prefill}, timeout=_READING_S))[0]:
            try:
                read = await verifier.lease.read_so_far()
            except RapidError:
                continue
            yield Reading(read.num_tokens, len(verifier.prompt_ids), num_cached=read.num_cached)
        if num_cached := verifier.prefill.result().num_cached_tokens:
            num_tokens = len(verifier.prompt_ids)
            yield Reading(num_tokens, num_tokens, num_cached=num_cached)

    async def _read_by_drafter(self, source: DraftSource, verifier: Holding) -> None:
        """Wait for the drafter's prefill; one that fails or hangs costs the drafter.

        Raises:
            DrafterUnavailable: The answer cannot do without the drafter.
            RapidError: The verifier's lease or engine is lost.
        """
        how: Failover
        try:
            await self._read(source)
            return
        except TargetUnavailable:  # the target reads for the drafter as well
            raise
        except RapidError as error:
            how = "drafter hung" if isinstance(error, DrafterHangs) else "drafter lost"
            cause = cause_of(error)
        await verifier.check()
        logger.warning("request %s: no drafter: %s", self._request.request_id, cause)
        self._run.lose_drafter(how, cause)
        await source.release()

    async def _read(self, source: DraftSource) -> None:
        """Wait for a source's prefills for as long as they read on.

        Raises:
            DrafterHangs: For as long as a round may take, not one token was read.
            RapidError: A lease or an engine of the source is lost.
        """
        reading, num_read = self._session.begin(source.read()), 0
        limit_s = self._patience.limit_s
        while not (await asyncio.wait({reading}, timeout=limit_s))[0]:
            so_far = await source.num_read()
            if so_far <= num_read:
                raise DrafterHangs(f"not one token was read within {limit_s:g} s")
            num_read = so_far
        await reading

    def _verdicts(
        self,
        verifier: Holding,
        answer: GrowingAnswer,
        drafter_reads: asyncio.Task[None] | None,
    ) -> AsyncIterator[Verdict]:
        """Run the rounds of one choice, after the tokens that its answer has committed."""
        relay = None
        pace = self._pace(answer, drafter_reads) if drafter_reads else None
        if text := self._text:
            relay = self._relay(answer, text, pace)
        return self._session.rounds(
            verifier,
            self._run.source,
            answer.choice,
            answer.statistics.token_ids,
            drafter=relay,
            pace=relay or pace,
            on_loss=functools.partial(self._note_loss, answer, relay),
            refresh=self._refresh(verifier, answer),
            trigger=self._trigger,
        )

    def _note_loss(
        self, answer: GrowingAnswer, relay: Relay | None, error: DrafterUnavailable
    ) -> Relay | None:
        """Log the loss of one answer's drafter and continue without it, or from the text."""
        logger.warning("request %s: no drafter any more: %s", self._request.request_id, error)
        self._run.lose_drafter_of(answer, "drafter lost", error)
        return relay.lose_model() if relay else None

    # --- drafting from the text -------------------------------------------------------------------

    @property
    def _text(self) -> LookupSource | None:
        """The text itself, where it drafts in rounds that are measured."""
        source = self._run.source
        if isinstance(source, LookupSource):
            return source if self._can_rest else None
        return self._run.text if self._run.drafts_from_text else None

    async def _index_text(self, verifier: Holding) -> None:
        if text := self._text:
            await text.hold(DraftNeeds(self._session, verifier, None))

    def _relay(self, answer: GrowingAnswer, text: LookupSource, pace: Controller | None) -> Relay:
        """Return who drafts an answer's rounds: the text, and the source beside it."""
        source, token_ids = self._run.source, answer.statistics.token_ids
        max_draft, num_left = self._session.terms.speculation.max_draft, self._num_left(answer)
        copies = text.drafter(answer.choice, token_ids)
        by_text = TextController(
            self._text_costs,
            len(self._run.prompts["target"]) + len(token_ids),
            max_draft,
            lambda: copies.longest,
            num_left=num_left,
        )
        if source is None or source is text or pace is None:
            return Relay(copies, by_text)
        return Relay(copies, by_text, source.drafter(answer.choice, token_ids), pace)

    # --- retrieving again -------------------------------------------------------------------------

    def _refresh(self, verifier: Holding, answer: GrowingAnswer) -> Refresh | None:
        """Return the function that retrieves again for the drafter, or None if that is off."""
        source = self._run.source
        if not self._request.speculation.refresh or not isinstance(source, PoolSource):
            return None
        use = functools.partial(self._use, verifier, source)
        return Rereading(source, answer.statistics, self._find, use, answer.choice)

    async def _find(self, token_ids: tuple[int, ...]) -> DrafterPrompt | None:
        """Retrieve with the question and the answer so far; None where nothing is found.

        Raises:
            DrafterUnavailable: Retrieval failed.
        """
        found = await self._readings.find(self._prompts.target.decode(token_ids))
        if found.evidence.is_lost:
            raise DrafterUnavailable(found.evidence.why_none)
        return found if found.evidence.num_chunks else None

    async def _use(
        self, verifier: Holding, source: PoolSource, found: DrafterPrompt, _: tuple[int, ...]
    ) -> None:
        """Take the drafter's leases again, on the prompt of what was found, and wait for them.

        Raises:
            DrafterUnavailable: No lease is available for the new prompt, or it does not fit.
            RapidError: The verifier's lease or engine is lost.
        """
        run = self._run
        before = run.chunks, dict(run.prompts)
        try:
            await self._readings.use(found, has_witness=isinstance(source, WitnessedSource))
            await self._leases.hold_drafter(verifier)
            await self._read(source)
        except TargetUnavailable:
            raise
        except RapidError as error:
            await verifier.check()
            run.chunks, run.prompts = before  # what was drafted was drafted from these
            raise DrafterUnavailable(f"The drafter cannot go on reading: {error}") from error

    # --- draft lengths ----------------------------------------------------------------------------

    @property
    def _contract(self) -> str:
        assert self._run.decision is not None
        return self._run.decision.contract

    @property
    def _can_rest(self) -> bool:
        """Whether rounds without the drafter change nothing."""
        return self._contract == "target" and self._run.is_paced

    def _pace(self, answer: GrowingAnswer, drafter_reads: asyncio.Task[None]) -> Controller | None:
        """Return the controller of an answer's draft lengths; None always drafts `max_draft`."""
        run = self._run
        if not run.is_paced:
            return None
        return Controller(
            self._costs,
            len(run.prompts["target"]) + len(answer.statistics.token_ids),
            self._session.terms.speculation.max_draft,
            can_rest=self._can_rest,
            num_left=self._num_left(answer),
            is_read=lambda: drafter_reads.done() and run.source is not None,
            on_rest=functools.partial(self._rest, answer),
        )

    def _num_left(self, answer: GrowingAnswer) -> int:
        """Return how many tokens an answer may still get."""
        return self._session.terms.max_tokens - len(answer.statistics.token_ids)

    def _rest(self, answer: GrowingAnswer) -> None:
        """Note that an answer rests for good; when all do, give the drafter's lease back."""
        run = self._run
        self._resting.add(answer.choice)
        growing = {each.choice for each in run.answers if not each.is_finished}
        is_kept = self._request.citations  # the drafter says at the end what the answer needed
        if run.source is not None and growing <= self._resting and not is_kept:
            self._session.begin(run.source.release())
            run.source = None


def spell_prompt(_: Sequence[Document], run: Run) -> tuple[str, tuple[TokenText, ...]]:
    """Return what answers begin with: the text of a prompt that is no chat, and its tokens.

    There is no text unless it is to be told, and no tokens unless their log-probabilities are.

    Raises:
        EngineFailed: The engine has not scored the prompt.
    """
    request, text = run.request, run.services.prompts.target
    if not request.echoes_prompt:
        return "", ()
    token_ids = run.prompts["target"].tolist()
    (prompt,) = request.prompts
    told = prompt if isinstance(prompt, str) else text.decode(token_ids)
    if run.scored_from is None:
        return told, ()
    assert run.prefill is not None
    scores = run.prefill.prompt_scores
    if len(scores) != len(token_ids) - run.scored_from:
        raise EngineFailed("the target's engine scores no prompts")
    first = [] if request.num_known else [TokenText(text.token_text(token_ids[0]), math.nan)]
    return told, (*first, *(spell(text, each) for each in scores))
