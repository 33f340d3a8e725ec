"""The method in process, without Ray: load two models, generate, look at the statistics.

For researchers and tests. Engines are made for one call and closed after it; a service keeps them
(see `deployments`).
"""

from __future__ import annotations

import asyncio
import secrets
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any, TypeVar

from rapid.checkpoints.vocabulary import check_same_vocabulary
from rapid.config import (
    Coupling,
    EngineConfig,
    PromptLookup,
    Rule,
    SamplingConfig,
    SpeculationConfig,
    Transfer,
    WindowDrafting,
)
from rapid.engines.engine import Engine
from rapid.engines.forward.loading import LoadedModel, load_model
from rapid.engines.ports import EngineDrafter, EngineVerifier, WindowDrafter
from rapid.errors import ConfigurationError
from rapid.messages import DraftBlock, LeaseRequest, TokenLogprobs, Verdict, as_prompt
from rapid.ports import Drafter
from rapid.speculation.lookup import PromptIndex, PromptLookupDrafter
from rapid.speculation.loop import speculate
from rapid.speculation.statistics import RoundStatistics

Result = TypeVar("Result")
Drafting = LoadedModel | PromptLookup | WindowDrafting
Refresh = Callable[[tuple[int, ...]], Sequence[int]]

_ETA = 10.0


@dataclass(frozen=True, slots=True)
class Generation:
    """An answer and how it came about.

    Attributes:
        token_ids: the answer, with its end-of-sequence token if it came to one.
        statistics: rounds, drafted and accepted tokens, refreshes, origins, times; if the drafter
            was lost, `plain_from` says from which token on and `plain_reason` why.
        seed: all randomness; the same call with it gives the same answer.
    """

    token_ids: tuple[int, ...]
    statistics: RoundStatistics
    seed: int
    logprobs: tuple[TokenLogprobs, ...] = ()


def load(model: str, **settings: Any) -> LoadedModel:
    """Load a Llama, Qwen2 or Qwen3 checkpoint.

    Args:
        model: a directory, a hub name, ``embedded:target`` or ``embedded:drafter``.
        settings: fields of `rapid.config.EngineConfig`: dtype, device, rope_scaling, threads, ...
            `kv_cache_tokens` and `max_leases` are for services: `generate` makes room for exactly
            its own request. So is `draft_ahead`: two engines in one process share Python's lock,
            and drafting ahead made answers slower there (``benchmarks/draft_ahead.py``).

    Raises:
        ConfigurationError: the checkpoint is missing or not supported.
    """
    return load_model(EngineConfig(model=str(model), **settings))


def generate(
    target: LoadedModel,
    drafter: Drafting | None,
    input_ids: Sequence[int],
    draft_input_ids: Sequence[int] = (),
    *,
    max_tokens: int = 256,
    eta: float | None = None,
    max_draft: int = 10,
    rule: Rule = "exact",
    transfer: Transfer | None = None,
    coupling: Coupling | None = None,
    plausibility: float = 0.1,
    draft_top_k: int | EllipsisType | None = ...,
    transfer_temperature: float = 1.0,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    seed: int | None = None,
    num_logprobs: int | None = None,
    refresh: Refresh | None = None,
) -> Generation:
    """Answer one prompt; blocks until done, also from inside a running event loop (a notebook).

    An answer whose drafter fails on the way goes on as the target's own, as a service's does: a
    UserWarning says so, and the statistics of the result say from which token on.

    Args:
        target: reads `input_ids`, the long context.
        drafter: reads `draft_input_ids`, the retrieved context; may be `target` itself. None
            decodes plainly; `PromptLookup` and `WindowDrafting` read nothing but `input_ids`.
        max_tokens: longest answer.
        eta: 0 samples the target's own distribution, above it the fused one. None is 10 with a
            model that drafts; a drafter that reads nothing of its own has nothing to transfer.
        rule: `paper` is the reference code's, for reproducing its tables.
        transfer: None is the default of `rapid.config.SpeculationConfig`; `paper` has `distill`.
        coupling: None is `shared_noise` when a seed is given, else `maximal`; `paper` has no other.
        draft_top_k: None keeps the whole proposal, as `paper` does; left out it is 64 otherwise.
        num_logprobs: None for none, else alternatives beside each token.
        refresh: given the answer's tokens so far, returns what the drafter reads from then on in
            the place of `draft_input_ids`; called after rejected drafts, up to four times
            (`rapid.speculation.refreshing`). To be exact it must be a function of these tokens.

    Raises:
        ConfigurationError: the two models do not share a vocabulary, the drafter has nothing to
            transfer, `paper` has no model that drafts, or `refresh` nothing to do.
        BadRequest: `paper` at temperature 0.
        PromptTooLong: prompt and answer exceed a model's context.
        pydantic.ValidationError: a setting is out of range.
    """
    reads_alone = isinstance(drafter, LoadedModel)
    if eta and not reads_alone and drafter is not None:
        raise ConfigurationError(
            f"{drafter!r} reads nothing that the target does not: set eta to 0, or leave it out"
        )
    if rule == "paper" and not reads_alone:
        raise ConfigurationError("rule 'paper' needs a drafter model, as the reference does")
    if refresh is not None and (rule == "paper" or not reads_alone):
        raise ConfigurationError(
            "refresh gives a drafter model something else to read, under rule 'exact': leave it out"
        )
    sampling = SamplingConfig(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=secrets.randbits(63) if seed is None else seed,
    )
    shares_noise = seed is not None and rule == "exact"
    settings = {
        "rule": rule,
        "transfer": transfer or ...,
        "eta": (_ETA if reads_alone else 0.0) if eta is None else eta,
        "max_draft": max_draft,
        "coupling": coupling or ("shared_noise" if shares_noise else "maximal"),
        "plausibility": plausibility,
        "draft_top_k": draft_top_k,
        "transfer_temperature": transfer_temperature,
    }
    speculation = SpeculationConfig(**{k: v for k, v in settings.items() if v is not ...})
    long, short = (
        LeaseRequest(
            lease_id="generate",
            tenant="local",
            prompt_ids=as_prompt(ids),
            max_tokens=max_tokens,
            sampling=sampling,
            speculation=speculation,
            num_logprobs=num_logprobs,
        )
        for ids in (input_ids, draft_input_ids)
    )
    generation = _run(_generate(target, drafter, long, short, refresh))
    told = generation.statistics
    if told.plain_from is not None:
        warnings.warn(
            f"the drafter was lost: the answer is the target's own from token {told.plain_from} on "
            f"({told.plain_reason})",
            stacklevel=2,
        )
    return generation


async def _generate(
    target: LoadedModel,
    drafter: Drafting | None,
    long: LeaseRequest,
    short: LeaseRequest,
    refresh: Refresh | None,
) -> Generation:
    model = drafter if isinstance(drafter, LoadedModel) else None
    vocab_size = check_same_vocabulary(target, model) if model else None
    engines, statistics, verdicts = list[Engine](), RoundStatistics(), list[Verdict]()

    async def refreshed(token_ids: tuple[int, ...]) -> EngineDrafter:
        """The drafter on what `refresh` found, in an engine with room for that."""
        assert model is not None
        assert refresh is not None
        request = replace(short, prompt_ids=as_prompt(refresh(token_ids)), committed=(token_ids,))
        engines.pop().close()
        engines.append(_engine(model, request, vocab_size))
        await engines[-1].open(request)
        await engines[-1].prefill(request.lease_id)
        statistics.refreshes += 1
        return EngineDrafter(engines[-1], request.lease_id)

    try:
        engines.append(_engine(target, long, vocab_size))
        if model is not None:
            engines.append(_engine(model, short, vocab_size))
        for engine, request in zip(engines, (long, short), strict=False):
            await engine.open(request)
        await asyncio.gather(*(engine.prefill(long.lease_id) for engine in engines))
        async for verdict in speculate(
            _port(drafter, engines[-1], long),
            EngineVerifier(engines[0], long.lease_id, 0),
            max_tokens=long.max_tokens,
            max_draft=long.speculation.max_draft,
            on_loss=statistics.lose_drafter,
            refresh=refreshed if refresh else None,
        ):
            statistics.observe(verdict)
            verdicts.append(verdict)
    finally:
        for engine in engines:
            engine.close()
    return Generation(
        token_ids=tuple(statistics.token_ids),
        statistics=statistics,
        seed=long.sampling.seed,
        logprobs=tuple(entry for verdict in verdicts for entry in verdict.logprobs),
    )


def _port(
    drafter: Drafting | None, engine: Engine, request: LeaseRequest
) -> Drafter[DraftBlock | Awaitable[DraftBlock]] | None:
    """What drafts for `request`; the engine is the drafter's, or the target's if it has none."""
    if drafter is None:
        return None
    if isinstance(drafter, PromptLookup):
        return PromptLookupDrafter(PromptIndex(request.prompt_ids))
    if isinstance(drafter, WindowDrafting):
        return WindowDrafter(engine, request.lease_id, window=drafter)
    return EngineDrafter(engine, request.lease_id)


def _engine(loaded: LoadedModel, request: LeaseRequest, vocab_size: int | None) -> Engine:
    """An engine as the model was loaded for, with room for exactly this request."""
    num_tokens = len(request.prompt_ids) + request.max_tokens + request.speculation.max_draft
    config = loaded.config
    max_context = min(num_tokens, config.max_context or loaded.max_context)
    room = {
        "max_context": max_context,
        "kv_cache_tokens": max_context + config.page_tokens,
        "max_leases": 1,
        "draft_ahead": False,
    }
    return Engine(loaded, config.model_copy(update=room), vocab_size=vocab_size)


def _run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
