"""A backend with engines in this process, which runs every system through the same loop."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import Any, TypeVar

from evaluation.drivers.answering import BackendLost, Trial, by_position, result_of, seed_of
from evaluation.drivers.prompter import Prompter, ShortContext, open_prompter
from evaluation.items import Item
from evaluation.results import Result
from evaluation.systems import System
from evaluation.tasks import Condition, Task
from rapid.answering.leases.session import DraftNeeds, DraftSource, Holding, Role, Session
from rapid.answering.leases.sources import Drafts, Rereading, choose
from rapid.checkpoints.text import ChatText
from rapid.checkpoints.vocabulary import check_same_vocabulary
from rapid.config import EngineConfig, PromptLookup, SamplingConfig
from rapid.engines.engine import Engine
from rapid.engines.forward.weights.loading import LoadedModel, check_memory
from rapid.engines.local_ports import LocalPool, make_engine
from rapid.engines.parallel.leading import load_replica
from rapid.errors import EngineFailed, RapidError
from rapid.messages import Int32Array, Terms
from rapid.ports import Drafter, Refresh
from rapid.speculation.statistics import RoundStatistics
from retrieval import RetrievalConfig

PREFILL_SLOWDOWN = 1e6  # nobody waits for a token here: prefill gets all that a step has left
_WORDING_TOKENS = 1024  # tokens of a prompt besides its context: template, question, choices

Made = TypeVar("Made")


class InProcess:
    """A backend with a target and a drafter behind their engines; see `open_in_process`."""

    def __init__(
        self,
        task: Task,
        prompter: Prompter,
        target: Engine,
        drafter: Engine,
        text: ChatText,
        kept_prompts: int,
    ) -> None:
        """Create a backend; the caller closes the engines.

        Args:
            drafter: The drafter's engine; the target's own where there is no other.
            text: Decodes token ids into text.
            kept_prompts: Number of prompts to cache for the systems that share them.
        """
        self._task = task
        self._prompter = prompter
        self._engines = (target, drafter)
        self._target = LocalPool(target)
        self._drafter = self._target if drafter is target else LocalPool(drafter)
        self._text = text
        self._prompts = _Recent(kept_prompts)

    async def answer(self, trial: Trial) -> Result:
        """Return the answer, as `evaluation.drivers.answering.Backend` defines it."""
        try:
            return await self._answer(trial)
        except RapidError as error:
            for engine in self._engines:
                try:
                    engine.check_running()
                except EngineFailed as closed:
                    why = str(error).rstrip(".")
                    raise BackendLost(
                        f"an engine of this run has closed: {why}. Its log says why; the same "
                        "command goes on with the answers that are left"
                    ) from closed
            raise

    async def _answer(self, trial: Trial) -> Result:
        item, system, condition = trial.item, trial.system, trial.condition
        found = await self._search(item, condition) if system.reads_retrieved else None
        retrieved = (
            None if found is None else self._prompter.encode(found, system.drafts == "target")
        )
        read = await self._read(trial, found)
        ms: dict[str, float] = {"retrieval": found.retrieval_ms if found else 0.0}
        if system.is_drafted:
            statistics = await self._speculate(trial, read, retrieved, found, ms)
        elif system.is_plain:
            statistics = await self._decode(self._target, "target", read, trial, ms)
        else:
            statistics = await self._decode(self._own(system), "drafter", read, trial, ms)
        reasoning, prediction = None, self._text.decode(statistics.token_ids)
        if self._task.extraction is not None:
            reasoning = prediction
            shown = None if system.reads_everything else found
            prompt = self._prompter.extraction_prompt(item, condition, reasoning, shown)
            length = self._task.extraction_tokens
            extracted = await self._decode(self._target, "target", prompt, trial, {}, length)
            prediction = self._text.decode(extracted.token_ids)
        return result_of(
            trial,
            self._task,
            prediction=prediction,
            reasoning=reasoning,
            context_tokens=len(read) if system.reads_everything else 0,
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
        trial: Trial,
        read: Int32Array,
        retrieved: Int32Array | None,
        found: ShortContext | None,
        ms: dict[str, float],
    ) -> RoundStatistics:
        """Answer with the system's drafts, verified by the target, whose prompt is `read`."""
        short = read if trial.system.drafts == "naive" else retrieved
        witness = self._witness_prompt(trial, found)
        source = choose(
            self._drafts(trial.system),
            self._target,
            short_tokens=max(len(ids) if ids is not None else 0 for ids in (short, witness)),
            is_witnessed=witness is not None,
        )
        async with Session(self._terms(trial)) as session:
            verifier = await session.take(
                self._target, "target", read, companion_tokens=source.companion_tokens
            )
            await verifier.prefill  # prefills run one after the other, so that each is timed alone
            await source.hold(DraftNeeds(session, verifier, short, witness_ids=witness))
            await source.read()
            return await self._rounds(session, verifier, source, trial, ms)

    async def _decode(
        self,
        pool: LocalPool,
        role: Role,
        prompt_ids: Int32Array,
        trial: Trial,
        ms: dict[str, float],
        max_tokens: int | None = None,
    ) -> RoundStatistics:
        """Answer by decoding `prompt_ids` without drafts, with the model behind `pool`."""
        async with Session(self._terms(trial, max_tokens)) as session:
            verifier = await session.take(pool, role, prompt_ids)
            await verifier.prefill
            return await self._rounds(session, verifier, None, trial, ms)

    async def _rounds(
        self,
        session: Session,
        verifier: Holding,
        source: DraftSource | None,
        trial: Trial,
        ms: dict[str, float],
    ) -> RoundStatistics:
        """Run the loop until the answer ends."""
        statistics = RoundStatistics()
        refresh: Refresh | None = None
        if trial.system.refresh:
            assert source is not None

            async def find(token_ids: tuple[int, ...]) -> ShortContext:
                so_far = self._text.decode(token_ids)
                return await self._prompter.retrieve(trial.item, trial.condition, so_far)

            async def use(found: ShortContext, token_ids: tuple[int, ...]) -> None:
                short = self._prompter.encode(found, trial.system.drafts == "target")
                witness = self._witness_prompt(trial, found)
                needs = DraftNeeds(session, verifier, short, None, (token_ids,), witness)
                await source.hold(needs)
                await source.read()

            reread = Rereading(source, statistics, find, use)

            async def refresh(token_ids: tuple[int, ...]) -> Drafter[Any] | None:
                began = perf_counter()
                drafter = await reread(token_ids)
                ms["refresh"] = ms.get("refresh", 0.0) + (perf_counter() - began) * 1e3
                return drafter

        began = perf_counter()
        async for verdict in session.rounds(verifier, source, refresh=refresh):
            statistics.observe(verdict)
        ms["decode"] = (perf_counter() - began) * 1e3
        ms["draft"], ms["verify"] = statistics.draft_ms, statistics.verify_ms
        taken = session.timings_ms
        names = ("target_prefill", "drafter_prefill", "witness_prefill")
        ms |= {name: taken[name] for name in names if taken.get(name)}
        return statistics

    def _witness_prompt(self, trial: Trial, found: ShortContext | None) -> Int32Array | None:
        """Return what the target reads beside its own context, or None if that is nothing."""
        speculation = trial.system.speculation(trial.condition.eta)
        if found is None or self._own(trial.system) is self._target:
            return None
        return self._prompter.encode(found, True) if speculation.is_witnessed else None

    def _drafts(self, system: System) -> Drafts:
        """Return what drafts for a system: settings, or the pool of a model."""
        if system.drafts == "lookup":
            return PromptLookup()
        return system.window_drafting if system.drafts == "window" else self._own(system)

    def _terms(self, trial: Trial, max_tokens: int | None = None) -> Terms:
        sampling = SamplingConfig(
            temperature=trial.system.temperature_in(self._task.temperature),
            top_k=self._task.top_k,
            seed=seed_of(self._task, trial.item),
        )
        return Terms(
            # A tenant reuses nothing of what another has read.
            tenant="local" if self._task.reuses_prefill else trial.system.name,
            sampling=sampling,
            speculation=trial.system.speculation(trial.condition.eta),
            max_tokens=max_tokens or self._task.max_tokens,
            request_id="/".join((trial.item.id, trial.system.name, trial.condition.name)),
        )

    def _own(self, system: System) -> LocalPool:
        """Return the pool of the model that drafts for `system` or answers without a target."""
        return self._drafter if system.drafts in ("drafter", "naive") else self._target

    async def _read(self, trial: Trial, found: ShortContext | None) -> Int32Array:
        """Return the prompt of the target, or of the model that answers without it."""
        item, system, condition = trial.item, trial.system, trial.condition
        if not system.reads_everything:
            assert found is not None
            return self._prompter.encode(found, system.needs_target or system.drafts == "target")
        alone = system.is_drafter_alone
        prompt = self._prompter.drafter_prompt if alone else self._prompter.target_prompt
        return await self._prompts.get(
            (item.id, condition.context_tokens, alone),
            lambda: asyncio.to_thread(prompt, item, condition),
        )

    async def _search(self, item: Item, condition: Condition) -> ShortContext:
        reading = condition.model_copy(update={"name": "", "eta": None})
        return await self._prompts.get(
            (item.id, reading), lambda: self._prompter.retrieve(item, condition)
        )


@asynccontextmanager
async def open_in_process(
    task: Task,
    models: Models,
    items: Sequence[Item],
    mine: Sequence[Item],
    *,
    batch: int,
) -> AsyncIterator[InProcess]:
    """Load the models and make room for `batch` of the longest prompts of `mine` at once.

    Args:
        task: The task, whose systems and conditions determine the room that each engine needs.
        models: The drafter is None where no system needs one other than the target.
        items: All items of the run, from which unrelated chunks are taken.
        mine: The items to answer.

    Raises:
        ConfigurationError: A checkpoint cannot be used, the two models do not share a vocabulary,
            or the device does not have the memory.
    """
    both = [models.target, *([models.drafter] if models.drafter else [])]
    await asyncio.to_thread(check_memory, *both)
    async with AsyncExitStack() as opened:
        loaded: list[LoadedModel] = []
        for config in both:
            loaded.append(await asyncio.to_thread(load_replica, config))
            if (followers := loaded[-1].followers) is not None:
                opened.callback(followers.close)
        vocab_size = check_same_vocabulary(*loaded) if models.drafter else None
        text = ChatText.load(models.target.model)
        other_text = ChatText.load(models.drafter.model) if models.drafter else text
        prompter = await open_prompter(task, items, text, other_text)
        opened.push_async_callback(prompter.close)
        lengths = await asyncio.to_thread(_lengths, task, mine, prompter)
        rooms = _rooms(task, lengths, has_drafter=models.drafter is not None)
        engines: list[Engine] = []
        for model, num_tokens in zip(loaded, rooms, strict=False):
            engines.append(_engine(model, num_tokens * batch, 2 * batch, vocab_size))
            opened.push_async_callback(asyncio.to_thread, engines[-1].close)
        yield InProcess(task, prompter, engines[0], engines[-1], text, 4 * batch)


@dataclass(frozen=True, slots=True)
class Models:
    """The checkpoints of a run; without a drafter the target drafts for itself."""

    target: EngineConfig
    drafter: EngineConfig | None


class _Recent:
    """A cache of the latest results by key; callers with the same key share one result."""

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


def _lengths(task: Task, items: Sequence[Item], prompter: Prompter) -> tuple[int, int]:
    """Return the approximate lengths of the longest whole prompt and the longest retrieved one."""
    widest = max(task.conditions, key=lambda each: each.context_tokens or inf)
    longest = max(len(prompter.target_prompt(item, widest)) for item in items)
    budgets = [each.retrieval_tokens or task.retrieval.tokens for each in task.conditions]
    budget = max(each or RetrievalConfig().budget_for(longest) for each in budgets)
    return longest, min(longest, 2 * budget) + _WORDING_TOKENS


def _rooms(task: Task, lengths: tuple[int, int], *, has_drafter: bool) -> tuple[int, int]:
    """Return the tokens of KV that one answer may need on the target's and the drafter's engine."""
    longest, retrieved = lengths
    answer = task.max_tokens + max(each.block for each in task.systems)
    if task.extraction is not None:
        answer += task.extraction_tokens + _WORDING_TOKENS
    target = drafter = beside_target = 0
    for system in task.systems:
        if system.needs_target or task.extraction is not None:
            target = max(target, (longest if system.reads_everything else retrieved) + answer)
        read = retrieved if system.reads_retrieved else longest if system.drafts == "naive" else 0
        if not read:
            continue
        is_own = not has_drafter or system.drafts == "target"
        if not is_own:
            drafter = max(drafter, read + answer)
        if is_own or system.transfer == "adaptive":
            beside_target = max(beside_target, read + answer)
    return target + beside_target, drafter


def _engine(loaded: LoadedModel, num_tokens: int, leases: int, vocab_size: int | None) -> Engine:
    config = loaded.config
    most = config.max_context or loaded.max_context
    num_tokens += leases * config.page_tokens
    return make_engine(
        loaded,
        vocab_size,
        max_context=min(most, num_tokens // config.page_tokens * config.page_tokens),
        kv_cache_tokens=num_tokens,
        max_leases=leases,
        prefill_slowdown=PREFILL_SLOWDOWN,
    )
