"""Answers with engines in this process: every system through one loop and its drafter ports."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter
from typing import Any, TypeVar

from evaluation.drivers.answering import Work, by_position, seed_of
from evaluation.drivers.prompting import Found, Prompter, open_prompter
from evaluation.items import Item
from evaluation.results import Result
from evaluation.systems import System
from evaluation.tasks import Condition, Task
from rapid.checkpoints.text import ChatText
from rapid.checkpoints.vocabulary import check_same_vocabulary
from rapid.config import EngineConfig, SamplingConfig, SpeculationConfig
from rapid.engines.engine import Engine
from rapid.engines.forward.loading import LoadedModel, check_memory, load_model
from rapid.engines.ports import EngineDrafter, EngineVerifier, WindowDrafter
from rapid.messages import DraftBlock, Int32Array, LeaseRequest
from rapid.ports import Drafter
from rapid.speculation.lookup import PromptIndex, PromptLookupDrafter
from rapid.speculation.loop import speculate
from rapid.speculation.statistics import RoundStatistics
from retrieval import RetrievalConfig

_LEASE_TTL_S = 3600.0  # nobody leaves a lease behind here, and one may wait for a long prefill
_WORDING_TOKENS = 1024  # of a prompt besides its context: template, question, choices

Port = Drafter[DraftBlock | Awaitable[DraftBlock]]
Refresh = Callable[[tuple[int, ...]], Awaitable[Port]]
Made = TypeVar("Made")


class InProcess:
    """A target and a drafter behind their engines; see `open_in_process`."""

    def __init__(
        self,
        task: Task,
        prompter: Prompter,
        target: Engine,
        drafter: Engine,
        text: ChatText,
        kept_prompts: int,
    ) -> None:
        """Take engines that somebody else closes.

        Args:
            task: how items are asked and how long answers are.
            prompter: renders for both models.
            target: the target's engine.
            drafter: the drafter's; the target's own where there is no other.
            text: turns ids into text.
            kept_prompts: prompts to remember, because the systems of an item share them.
        """
        self._task = task
        self._prompter = prompter
        self._target = target
        self._drafter = drafter
        self._text = text
        self._prompts = _Recent(kept_prompts)

    async def answer(self, work: Work) -> Result:
        """Answer; see `evaluation.drivers.answering.Backend`."""
        item, system, condition = work.item, work.system, work.condition
        ask = _Ask(work, self._task)
        found = await self._found(item, condition) if system.reads_retrieved else None
        retrieved = (
            None if found is None else self._prompter.encode(found, system.drafts == "target")
        )
        context = None if system.method == "rag" else await self._context(item, condition)
        ms: dict[str, float] = {"retrieval": found.retrieval_ms if found else 0.0}
        if context is None:
            assert retrieved is not None
            engine = self._own(system)
            statistics = await self._decode(engine, ask.lease(retrieved, "alone"), ms, "drafter")
        else:
            engine = self._target
            statistics = await self._speculate(ask, context, retrieved, ms)
        reasoning, prediction = None, self._text.decode(statistics.token_ids)
        if self._task.templates is not None and self._task.templates.extraction is not None:
            reasoning = prediction
            shown = found if system.method == "rag" else None
            prompt = self._prompter.extraction_prompt(item, condition, reasoning, shown)
            lease = ask.lease(prompt, "extraction", self._task.extraction_tokens)
            prediction = self._text.decode((await self._decode(engine, lease, {})).token_ids)
        return Result(
            item=item.id,
            system=system.name,
            condition=condition.name,
            prediction=prediction,
            reasoning=reasoning,
            groups=dict(item.groups),
            seed=ask.sampling.seed,
            context_tokens=0 if context is None else len(context),
            retrieved_tokens=0 if retrieved is None else len(retrieved),
            tokens=len(statistics.token_ids),
            rounds=statistics.rounds,
            drafted=statistics.drafted,
            accepted=statistics.accepted,
            refreshes=statistics.refreshes,
            by_position=by_position(statistics.histogram),
            ms={name: round(value, 3) for name, value in ms.items()},
            evidence_found=found.evidence_found if found else None,
        )

    async def _speculate(
        self,
        ask: _Ask,
        context: Int32Array,
        retrieved: Int32Array | None,
        ms: dict[str, float],
    ) -> RoundStatistics:
        """Draft as the system does and verify with the target."""
        system = ask.work.system
        if not system.is_drafted:
            return await self._decode(self._target, ask.lease(context, "target"), ms)
        short = context if system.drafts == "naive" else retrieved
        engine = self._own(system)
        is_beside = engine is self._target
        companion = len(short) if short is not None and is_beside else 0
        long = ask.lease(context, "target", companion=companion)
        async with AsyncExitStack() as leases:
            await leases.enter_async_context(_leased(self._target, long))
            if short is not None:
                beside = long.lease_id if is_beside else None
                lease = ask.lease(short, "drafter", beside=beside)
                await leases.enter_async_context(_leased(engine, lease))
                ms["drafter_prefill"] = await _prefill(engine, lease)
            ms["target_prefill"] = await _prefill(self._target, long)
            began = perf_counter()
            port: Port
            if system.drafts == "lookup":
                port = PromptLookupDrafter(PromptIndex(context))
            elif system.drafts == "window":
                port = WindowDrafter(self._target, long.lease_id, window=system.window_drafting)
            else:
                port = EngineDrafter(engine, lease.lease_id)
            refresh = self._refresh(ask, engine, lease, ms) if system.refresh else None
            return await _rounds(port, self._target, long, began, ms, refresh)

    def _refresh(
        self, ask: _Ask, engine: Engine, lease: LeaseRequest, ms: dict[str, float]
    ) -> Refresh:
        """What makes the drafter of `lease` anew, on what is found for the answer so far."""
        item, system, condition = ask.work.item, ask.work.system, ask.work.condition
        question = item.query or item.messages[-1].content

        async def refreshed(token_ids: tuple[int, ...]) -> EngineDrafter:
            began = perf_counter()
            asked = replace(item, query=f"{question} {self._text.decode(token_ids)}")
            found = await self._prompter.retrieve(asked, condition)
            short = self._prompter.encode(found, system.drafts == "target")
            engine.release(lease.lease_id)
            await engine.open(replace(lease, prompt_ids=short, committed=(token_ids,)))
            await engine.prefill(lease.lease_id)
            ms["refresh"] = ms.get("refresh", 0.0) + (perf_counter() - began) * 1e3
            return EngineDrafter(engine, lease.lease_id)

        return refreshed

    async def _decode(
        self, engine: Engine, lease: LeaseRequest, ms: dict[str, float], reader: str = "target"
    ) -> RoundStatistics:
        """Plain decoding of one prompt, that of the target or what a drafter would read."""
        async with _leased(engine, lease):
            ms[f"{reader}_prefill"] = await _prefill(engine, lease)
            return await _rounds(None, engine, lease, perf_counter(), ms)

    def _own(self, system: System) -> Engine:
        """Where the model that drafts for `system`, or answers without a target, is."""
        return self._drafter if system.drafts in ("drafter", "naive") else self._target

    async def _context(self, item: Item, condition: Condition) -> Int32Array:
        return await self._prompts.get(
            (item.id, condition.context_tokens),
            lambda: asyncio.to_thread(self._prompter.target_prompt, item, condition),
        )

    async def _found(self, item: Item, condition: Condition) -> Found:
        reading = condition.model_copy(update={"name": "", "eta": None})
        return await self._prompts.get(
            (item.id, reading), lambda: self._prompter.retrieve(item, condition)
        )


@asynccontextmanager
async def open_in_process(
    task: Task,
    systems: Sequence[System],
    conditions: Sequence[Condition],
    models: Models,
    items: Sequence[Item],
    mine: Sequence[Item],
    *,
    batch: int,
) -> AsyncIterator[InProcess]:
    """Load the models and make room for `batch` of the longest prompts of `mine` at once.

    Args:
        task: what is asked.
        systems: they decide what room each engine needs.
        conditions: likewise.
        models: the drafter's is None where no system needs another one than the target.
        items: all of the run; unrelated chunks come from any of them.
        mine: what will be answered.
        batch: answers at once.

    Raises:
        ConfigurationError: a checkpoint cannot be used, the two do not share a vocabulary, or the
            device has not the memory.
    """
    both = [models.target, *([models.drafter] if models.drafter else [])]
    await asyncio.to_thread(check_memory, *both)
    target = await asyncio.to_thread(load_model, models.target)
    drafter = await asyncio.to_thread(load_model, models.drafter) if models.drafter else None
    vocab_size = check_same_vocabulary(target, drafter) if drafter else None
    text = ChatText.load(models.target.model)
    other_text = ChatText.load(models.drafter.model) if models.drafter else text
    prompter = await open_prompter(task, items, text, other_text)
    lengths = await asyncio.to_thread(_lengths, task, conditions, mine, prompter)
    room = _room(task, systems, lengths, has_drafter=drafter is not None)
    engines: list[Engine] = []
    try:
        for loaded, num_tokens in ((target, room.target), (drafter, room.drafter)):
            if loaded is not None:
                engines.append(_engine(loaded, num_tokens * batch, 2 * batch, vocab_size))
        yield InProcess(task, prompter, engines[0], engines[-1], text, 4 * batch)
    finally:
        for engine in engines:
            await asyncio.to_thread(engine.close)
        await prompter.close()


@dataclass(frozen=True, slots=True)
class Models:
    """The checkpoints of a run; without a drafter the target is its own."""

    target: EngineConfig
    drafter: EngineConfig | None


@dataclass(frozen=True, slots=True)
class _Ask:
    """What all leases of one answer share."""

    work: Work
    task: Task

    @property
    def sampling(self) -> SamplingConfig:
        temperature = self.work.system.temperature_in(self.task.temperature)
        return SamplingConfig(temperature=temperature, seed=seed_of(self.task, self.work.item))

    @property
    def speculation(self) -> SpeculationConfig:
        return self.work.system.speculation(self.work.condition.eta)

    def lease(
        self,
        prompt_ids: Int32Array,
        role: str,
        max_tokens: int | None = None,
        *,
        companion: int = 0,
        beside: str | None = None,
    ) -> LeaseRequest:
        work = self.work
        return LeaseRequest(
            lease_id="/".join((work.item.id, work.system.name, work.condition.name, role)),
            tenant=work.system.name,  # no system finds what another has read
            prompt_ids=prompt_ids,
            max_tokens=max_tokens or self.task.max_tokens,
            sampling=self.sampling,
            speculation=self.speculation,
            companion_tokens=companion,
            beside=beside,
        )


class _Recent:
    """The latest of what was made, by key; who asks for the same gets the same."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._made: OrderedDict[object, asyncio.Task[Any]] = OrderedDict()

    async def get(self, key: object, make: Callable[[], Coroutine[Any, Any, Made]]) -> Made:
        if key not in self._made:
            self._made[key] = asyncio.create_task(make())
            if len(self._made) > self._size:
                self._made.popitem(last=False)
        made: Made = await asyncio.shield(self._made[key])
        return made


@asynccontextmanager
async def _leased(engine: Engine, lease: LeaseRequest) -> AsyncIterator[None]:
    await engine.open(lease)
    try:
        yield
    finally:
        engine.release(lease.lease_id)


async def _prefill(engine: Engine, lease: LeaseRequest) -> float:
    began = perf_counter()
    await engine.prefill(lease.lease_id)
    return (perf_counter() - began) * 1e3


async def _rounds(
    port: Port | None,
    engine: Engine,
    lease: LeaseRequest,
    began: float,
    ms: dict[str, float],
    refresh: Refresh | None = None,
) -> RoundStatistics:
    """The loop until the answer ends."""
    statistics = RoundStatistics()

    async def counted(token_ids: tuple[int, ...]) -> Port:
        assert refresh is not None
        made = await refresh(token_ids)
        statistics.refreshes += 1
        return made

    async for verdict in speculate(
        port,
        EngineVerifier(engine, lease.lease_id),
        max_tokens=lease.max_tokens,
        max_draft=lease.speculation.max_draft,
        refresh=counted if refresh else None,
    ):
        statistics.observe(verdict)
    ms["decode"] = (perf_counter() - began) * 1e3
    ms["draft"], ms["verify"] = statistics.draft_ms, statistics.verify_ms
    return statistics


@dataclass(frozen=True, slots=True)
class _Room:
    """Tokens of KV that one answer may need on each engine."""

    target: int
    drafter: int


def _lengths(
    task: Task, conditions: Sequence[Condition], items: Sequence[Item], prompter: Prompter
) -> tuple[int, int]:
    """The longest whole prompt and the longest retrieved one, about."""
    widest = max(conditions, key=lambda each: each.context_tokens or inf)
    longest = max(len(prompter.target_prompt(item, widest)) for item in items)
    budgets = [each.retrieval_tokens or task.retrieval.tokens for each in conditions]
    budget = max(each or RetrievalConfig().budget_for(longest) for each in budgets)
    return longest, min(longest, 2 * budget) + _WORDING_TOKENS


def _room(
    task: Task, systems: Sequence[System], lengths: tuple[int, int], *, has_drafter: bool
) -> _Room:
    longest, retrieved = lengths
    answer = task.max_tokens + max(each.block for each in systems)
    if task.templates is not None and task.templates.extraction is not None:
        answer += task.extraction_tokens + _WORDING_TOKENS
    target = drafter = drafted_by_target = 0
    for system in systems:
        if system.method != "rag":
            target = longest + answer
        read = retrieved if system.reads_retrieved else longest if system.drafts == "naive" else 0
        if not read:
            continue
        if has_drafter and system.drafts != "target":
            drafter = max(drafter, read + answer)
        else:
            drafted_by_target = max(drafted_by_target, read + answer)
    return _Room(target + drafted_by_target, drafter)


def _engine(loaded: LoadedModel, num_tokens: int, leases: int, vocab_size: int | None) -> Engine:
    config = loaded.config
    most = config.max_context or loaded.max_context
    num_tokens += leases * config.page_tokens
    room = {
        "max_context": min(most, num_tokens // config.page_tokens * config.page_tokens),
        "kv_cache_tokens": num_tokens,
        "max_leases": leases,
        "lease_ttl_s": _LEASE_TTL_S,
        "draft_ahead": False,  # both engines share this process, and Python's lock
    }
    return Engine(loaded, config.model_copy(update=room), vocab_size=vocab_size)
