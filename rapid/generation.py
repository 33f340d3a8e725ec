"""In-process generation from token ids, without Ray, for research and tests.

`generate` makes its engines for one call and closes them after it. `rapid.pair` keeps models open
in one process, and `deployments` serves them.
"""

from __future__ import annotations

import asyncio
import secrets
import warnings
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from rapid.answering.leases.session import DraftNeeds, Session
from rapid.answering.leases.sources import PoolSource, Rereading, WitnessedSource, choose
from rapid.checkpoints.vocabulary import check_same_vocabulary, pack_tokens
from rapid.config import EngineConfig, OwnDrafting, SamplingConfig, SpeculationConfig
from rapid.engines.forward.weights.loading import LoadedModel, without_bars
from rapid.engines.local_ports import LocalPool, make_engine
from rapid.engines.parallel.leading import load_replica
from rapid.errors import ConfigurationError, DrafterUnavailable
from rapid.messages import Int32Array, Terms, TokenLogprobs, as_prompt
from rapid.speculation.statistics import RoundStatistics

Result = TypeVar("Result")
Reread = Callable[[tuple[int, ...]], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Generation:
    """A generated answer with its statistics.

    Attributes:
        token_ids: The answer, with its end-of-sequence token if it reached one.
        statistics: If the drafter was lost, `plain_from` is the first token decoded without it and
            `plain_reason` the cause.
        seed: Key of all random numbers; the same call with this seed gives the same answer.
        logprobs: One entry per token, if `num_logprobs` was given.
    """

    token_ids: tuple[int, ...]
    statistics: RoundStatistics
    seed: int
    logprobs: tuple[TokenLogprobs, ...] = ()


def load(model: str, **settings: Any) -> LoadedModel:
    """Load a checkpoint of a supported family (docs/models.md).

    Args:
        model: A directory, a hub name, ``embedded:target`` or ``embedded:drafter``.
        settings: Fields of `rapid.config.EngineConfig`: dtype, device, rope_scaling, threads, ...
            `generate` overrides `kv_cache_tokens` and `max_leases` with what its request needs,
            and turns `draft_ahead` off: two engines in one process share Python's global lock, and
            drafting ahead made answers slower there (``benchmarks/results/draft_ahead.md``).

    Raises:
        ConfigurationError: The checkpoint is missing or not supported.
    """
    with without_bars():
        return load_replica(EngineConfig(model=str(model), **settings))


def generate(
    target: LoadedModel,
    drafter: LoadedModel | OwnDrafting | None,
    input_ids: Sequence[int],
    draft_input_ids: Sequence[int] = (),
    *,
    max_tokens: int = 256,
    sampling: SamplingConfig | None = None,
    speculation: SpeculationConfig | None = None,
    num_logprobs: int | None = None,
    refresh: Reread | None = None,
) -> Generation:
    """Generate the answer to one prompt, blocking until it is complete.

    The function also works inside a running event loop, as in a notebook. If the drafter fails
    during the answer, the target continues alone, as in a service: a UserWarning is issued, and
    the statistics of the result contain the position. Before the first token that is an error where
    the answer is fused or follows the rule `paper`.

    Settings that are left out have the defaults of their class, with three exceptions. The seed is
    drawn. The coupling is `shared_noise` where a seed is given, except under the rule `paper`, so
    that the draft length does not change the answer. `eta` is 0 without a drafter model, because
    other drafters read nothing of their own that could be transferred.

    Args:
        target: The model that reads `input_ids`.
        drafter: The model that reads `draft_input_ids`; may be `target` itself. None decodes
            plainly. With settings of `OwnDrafting` nothing is read but `input_ids`.
        input_ids: Token ids of the long context.
        draft_input_ids: Token ids of the retrieved context.
        max_tokens: Longest answer, in tokens.
        num_logprobs: Number of alternatives beside each token's log-probability; None for no
            log-probabilities.
        refresh: Function from the answer's tokens so far to the token ids that the drafter reads
            from then on in place of `draft_input_ids`. It is called after rejected drafts, up to
            four times (`rapid.speculation.pace.refreshing`). The answer is exact only if the result
            depends on nothing but these tokens.

    Raises:
        ConfigurationError: The two models do not share a vocabulary, `eta` is set for a drafter
            that has nothing to transfer, `paper` or `refresh` has no drafter model, or `refresh` is
            combined with `paper`.
        BadRequest: `paper` was requested at temperature 0.
        DrafterUnavailable: The drafter failed before the first token of a fused answer.
        PromptTooLong: Prompt and answer exceed a model's context.
    """
    reads_alone = isinstance(drafter, LoadedModel)
    sampling, speculation = _fill_defaults(
        sampling or SamplingConfig(), speculation or SpeculationConfig(), reads_alone=reads_alone
    )
    if speculation.eta and not reads_alone and drafter is not None:
        raise ConfigurationError(
            f"{drafter!r} reads nothing that the target does not: set eta to 0, or leave it out"
        )
    if speculation.rule == "paper" and not reads_alone:
        raise ConfigurationError("rule 'paper' needs a drafter model, as the reference does")
    if refresh is not None and (speculation.rule == "paper" or not reads_alone):
        raise ConfigurationError(
            "refresh gives a drafter model something else to read, under rule 'exact': leave it out"
        )
    prompt_set = pack_tokens(input_ids) if sampling.repetition_penalty != 1 else b""
    terms = Terms(
        "local",
        sampling,
        speculation,
        max_tokens,
        num_logprobs=num_logprobs,
        prompt_set=prompt_set,
    )
    generation = _run(_generate(target, drafter, terms, input_ids, draft_input_ids, refresh))
    counted = generation.statistics
    if counted.plain_from is not None:
        warnings.warn(
            f"the drafter was lost: the answer is the target's own from token "
            f"{counted.plain_from} on ({counted.plain_reason})",
            stacklevel=2,
        )
    return generation


def _fill_defaults(
    sampling: SamplingConfig, speculation: SpeculationConfig, *, reads_alone: bool
) -> tuple[SamplingConfig, SpeculationConfig]:
    """Fill in settings that were left out and whose defaults depend on the call; see `generate`."""
    if "seed" not in sampling.model_fields_set:
        sampling = sampling.model_copy(update={"seed": secrets.randbits(63)})
    elif "coupling" not in speculation.model_fields_set:  # the rule `paper` sets its own
        speculation = speculation.model_copy(update={"coupling": "shared_noise"})
    if "eta" not in speculation.model_fields_set and not reads_alone:
        speculation = speculation.model_copy(update={"eta": 0.0})
    return sampling, speculation


async def _generate(
    target: LoadedModel,
    drafter: LoadedModel | OwnDrafting | None,
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
            longest = len(prompt_ids) + terms.max_tokens + terms.speculation.max_draft
            longest = min(longest, model.config.max_context or model.max_context)
            num_kept = longest + model.config.page_tokens
            engine = make_engine(
                model, vocab_size, max_context=longest, kv_cache_tokens=num_kept, max_leases=1
            )
            engines.callback(engine.close)
            return LocalPool(engine)

        async with Session(terms) as session:
            verifying = pool_for(target, long)
            verifier = await session.take(verifying, "target", long)
            source = None
            if drafter is not None:
                is_witnessed = model is not target and terms.speculation.is_witnessed
                source = choose(
                    drafter if not isinstance(drafter, LoadedModel) else pool_for(drafter, short),
                    verifying,
                    is_witnessed=is_witnessed,
                    witnesses=pool_for(target, short) if model and is_witnessed else None,
                )
                await source.hold(DraftNeeds(session, verifier, short, witness_ids=short))
                await source.read()
            await verifier.prefill

            async def find(token_ids: tuple[int, ...]) -> Int32Array:
                assert refresh is not None
                return as_prompt(refresh(token_ids))

            async def use(found: Int32Array, token_ids: tuple[int, ...]) -> None:
                assert model is not None
                assert isinstance(source, PoolSource)
                source.pool = pool_for(model, found)  # an engine has room for one prompt
                if isinstance(source, WitnessedSource):
                    source.witnesses = pool_for(target, found)
                needs = DraftNeeds(session, verifier, found, None, (token_ids,), found)
                await source.hold(needs)
                await source.read()

            def go_on_alone(error: DrafterUnavailable) -> None:
                is_fused = terms.speculation.eta > 0 or terms.speculation.rule == "paper"
                if is_fused and not statistics.token_ids:
                    raise error
                statistics.lose_drafter(error)

            async for verdict in session.rounds(
                verifier,
                source,
                on_loss=go_on_alone,
                refresh=Rereading(source, statistics, find, use) if refresh and source else None,
            ):
                statistics.observe(verdict)
                logprobs.extend(verdict.logprobs)
    return Generation(tuple(statistics.token_ids), statistics, terms.sampling.seed, tuple(logprobs))


def _run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
