"""The method in process, without Ray: load two models, generate, look at the statistics.

For researchers and tests. Engines are made for one call and closed after it; a service keeps them
(see `deployments`).
"""

from __future__ import annotations

import asyncio
import secrets
import warnings
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, TypeVar

from rapid.answering.session import Session, Terms
from rapid.answering.sources import DraftSource, LookupSource, PoolSource, WindowSource
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
from rapid.engines.ports import LocalPool
from rapid.errors import ConfigurationError
from rapid.messages import Int32Array, TokenLogprobs, as_prompt
from rapid.ports import Drafter, EnginePool
from rapid.speculation.statistics import RoundStatistics

Result = TypeVar("Result")
Drafting = LoadedModel | PromptLookup | WindowDrafting
Reread = Callable[[tuple[int, ...]], Sequence[int]]

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
    refresh: Reread | None = None,
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
    terms = Terms("generate", "local", sampling, speculation, max_tokens, num_logprobs=num_logprobs)
    generation = _run(_generate(target, drafter, terms, input_ids, draft_input_ids, refresh))
    counted = generation.statistics
    if counted.plain_from is not None:
        warnings.warn(
            f"the drafter was lost: the answer is the target's own from token "
            f"{counted.plain_from} on ({counted.plain_reason})",
            stacklevel=2,
        )
    return generation


async def _generate(
    target: LoadedModel,
    drafter: Drafting | None,
    terms: Terms,
    input_ids: Sequence[int],
    draft_input_ids: Sequence[int],
    refresh: Reread | None,
) -> Generation:
    model = drafter if isinstance(drafter, LoadedModel) else None
    vocab_size = check_same_vocabulary(target, model) if model else None
    long, short = as_prompt(input_ids), as_prompt(draft_input_ids)
    statistics, logprobs = RoundStatistics(), list[TokenLogprobs]()
    with ExitStack() as engines:

        def pool_for(model: LoadedModel, prompt_ids: Int32Array) -> LocalPool:
            engine = _engine(model, len(prompt_ids), terms, vocab_size)
            engines.callback(engine.close)
            return LocalPool(engine)

        async with Session(terms) as session:
            verifier = await session.take(pool_for(target, long), "target", long)
            source = _source(drafter, lambda: pool_for(model, short) if model else None)
            if source is not None:
                await source.hold(session, verifier, short)
                await source.read()
            await verifier.prefill

            async def reread(token_ids: tuple[int, ...]) -> Drafter[Any]:
                """Return the drafter on what `refresh` found, in an engine with room for that."""
                assert refresh is not None
                assert model is not None
                assert isinstance(source, PoolSource)
                found = as_prompt(refresh(token_ids))
                source.pool = pool_for(model, found)
                await source.hold(session, verifier, found, committed=(token_ids,))
                await source.read()
                statistics.refreshes += 1
                return source.drafter(0)

            async for verdict in session.rounds(
                verifier,
                source,
                on_loss=statistics.lose_drafter,
                refresh=reread if refresh else None,
            ):
                statistics.observe(verdict)
                logprobs.extend(verdict.logprobs)
    return Generation(tuple(statistics.token_ids), statistics, terms.sampling.seed, tuple(logprobs))


def _source(drafter: Drafting | None, pool: Callable[[], EnginePool | None]) -> DraftSource | None:
    """Return what drafts; `pool` makes the engine of a model that does."""
    if isinstance(drafter, PromptLookup):
        return LookupSource()
    if isinstance(drafter, WindowDrafting):
        return WindowSource(drafter)
    own = pool()
    return PoolSource(own) if own is not None else None


def _engine(loaded: LoadedModel, num_prompt: int, terms: Terms, vocab_size: int | None) -> Engine:
    """Return an engine as the model was loaded for, with room for exactly this request."""
    num_tokens = num_prompt + terms.max_tokens + terms.speculation.max_draft
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
