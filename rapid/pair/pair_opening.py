"""Loading a target and its drafter, and opening what both need to answer."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from pathlib import Path

from rapid.answering.leases.pair_pools import Pools
from rapid.answering.passage_gate import PassageGate
from rapid.answering.prompt.prompting import RequestPrompts
from rapid.answering.services import Services
from rapid.checkpoints.facts import read_model_facts
from rapid.checkpoints.files import checkpoint_source, read_temperature
from rapid.checkpoints.text import ChatText
from rapid.checkpoints.vocabulary import check_same_vocabulary
from rapid.config import AnsweringConfig, EngineConfig, OwnDrafting, SpeculationConfig
from rapid.engines.forward.weights.loading import LoadedModel, check_memory, without_bars
from rapid.engines.local_ports import LocalPool, make_engine
from rapid.engines.parallel.leading import load_replica
from rapid.errors import ConfigurationError
from rapid.estimators import Patience
from rapid.pair.loop_thread import LoopThread
from rapid.pair.pair import Pair
from retrieval import RetrievalConfig, Retriever, open_retriever

_EMBEDDED = "embedded:"
_FOR_EMBEDDED = RetrievalConfig(chunk_tokens=64, budget_tokens=320)  # as in `serve_config.yaml`


def open_pair(
    target: str | Path | EngineConfig,
    *,
    drafter: str | Path | EngineConfig | OwnDrafting | None = None,
    retrieval: RetrievalConfig | None = None,
    speculation: SpeculationConfig | None = None,
    context_tokens: int = 32_768,
    answerable_log_odds: float | None = None,
) -> Pair:
    """Load a target and its drafter, and keep both open for questions.

    Args:
        target: A checkpoint directory, a hub name, ``embedded:target``, or an engine's settings.
        drafter: Likewise. With None the target drafts for itself on the retrieved chunks; with
            settings of `OwnDrafting`, as `PromptLookup`, nothing is retrieved.
        retrieval: How documents are searched; None searches by words, without a download.
        speculation: Defaults for settings that a question leaves out; the paper's rule is a mode.
        context_tokens: Longest prompt plus answer, in tokens, for models given by name; their KV
            pool holds twice that.
        answerable_log_odds: See `AnsweringConfig`: `auto` asks the drafter first.

    Raises:
        ConfigurationError: A checkpoint cannot be used, the two do not share a vocabulary, or the
            memory does not suffice.
    """
    if speculation is not None and speculation.rule != "exact":
        raise ConfigurationError("speculation.rule is not for all answers: ask with mode 'paper'")
    configs = [_engine_config(target, context_tokens)]
    own_drafting = drafter if isinstance(drafter, OwnDrafting) else None
    if drafter is not None and not isinstance(drafter, OwnDrafting):
        configs.append(_engine_config(drafter, context_tokens))
    if own_drafting is None and configs[0].max_leases < 2:  # the target may read what is retrieved
        configs[0] = configs[0].model_copy(update={"max_leases": 2})
    check_memory(*configs, with_pools=True)
    with without_bars():
        models = [load_replica(config) for config in configs]
    vocab_size = check_same_vocabulary(*models) if len(models) == 2 else None
    texts = [ChatText.load(config.model) for config in configs]
    is_embedded = configs[0].model.startswith(_EMBEDDED)
    # The embedded models were taught one right answer to each question.
    temperature = 0.0 if is_embedded else read_temperature(checkpoint_source(configs[0].model))
    if retrieval is None:
        retrieval = _FOR_EMBEDDED if is_embedded else RetrievalConfig()
    with ExitStack() as opening:
        loop = opening.enter_context(LoopThread())
        for model in models:
            if model.followers is not None:
                opening.callback(model.followers.close)
        pools = [_pool(opening, model, vocab_size) for model in models]
        retriever: Retriever | None = None
        if own_drafting is None:
            offsets, tokenizer = texts[0].token_offsets, texts[0].fingerprint
            with without_bars():  # of an embedder
                retriever = loop.run(
                    lambda: open_retriever(retrieval, offsets, tokenizer=tokenizer)
                )
            opening.callback(loop.run, retriever.close)
        config = AnsweringConfig(answerable_log_odds=answerable_log_odds)
        prompts = RequestPrompts(
            texts[0],
            texts[-1],
            retriever,
            budget_tokens=retrieval.budget_tokens,
            budget_for=retrieval.budget_for,
        )
        opening.callback(prompts.close)
        services = Services(
            config=config,
            speculation=speculation or SpeculationConfig(),
            pools=Pools(
                target=pools[0],
                drafter=own_drafting or pools[-1],
                alone=pools[-1],
                max_context={
                    "target": configs[0].max_context or models[0].max_context,
                    "drafter": configs[-1].max_context or models[-1].max_context,
                },
            ),
            prompts=prompts,
            patience=Patience(config.drafter_hangs_s),
            gate=PassageGate(
                is_wanted=own_drafting is None and configs[-1].passage_cache_tokens > 0
            ),
        )
        opening.callback(loop.run, services.gate.end)
        loop.run(functools.partial(_begin_gate, services))
        return Pair(services, loop, opening.pop_all(), temperature)


async def _begin_gate(services: Services) -> None:
    services.gate.begin(services.prompts, services.pools)


def _pool(opening: ExitStack, model: LoadedModel, vocab_size: int | None) -> LocalPool:
    engine = make_engine(model, vocab_size)
    opening.callback(engine.close)
    return LocalPool(engine)


def _engine_config(model: str | Path | EngineConfig, context_tokens: int) -> EngineConfig:
    if isinstance(model, EngineConfig):
        return model
    if isinstance(model, Path):
        model = str(model)
    if not isinstance(model, str):
        raise ConfigurationError(
            "a model must be a checkpoint directory, a hub name or a rapid.config.EngineConfig; "
            f"it is of type {type(model).__name__}"
        )
    facts = read_model_facts(EngineConfig(model=model))
    longest = min(context_tokens, facts.num_positions)
    return EngineConfig(model=model, max_context=longest, kv_cache_tokens=2 * longest)
