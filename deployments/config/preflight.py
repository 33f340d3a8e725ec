"""Checks of a configuration that need its checkpoints but neither load weights nor start Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from cluster.placement import PoolConfig
from deployments.config.pools.pool_settings import EnginePoolConfig
from deployments.config.serve_config import ApplicationConfig, AppPart, ServedModel
from rapid.catalogue import check_fetched
from rapid.checkpoints.downloads.hub import check_available
from rapid.checkpoints.facts import check_vllm, read_model_facts
from rapid.checkpoints.files import checkpoint_source, read_temperature
from rapid.checkpoints.memory import check_fits, free_bytes, memory_needs, plan_pages
from rapid.checkpoints.text import ChatText
from rapid.checkpoints.vocabulary import check_same_vocabulary
from rapid.config import EngineConfig
from rapid.errors import ConfigurationError
from rapid.planning.plan import MemoryNeed
from rapid.vllm_config import VllmConfig
from retrieval.settings import LexicalEmbedderConfig

Config = TypeVar("Config", bound=ApplicationConfig)


def preflight(config: Config, *, runs_here: bool = False) -> Config:
    """Check the checkpoints against the configuration and each other.

    Args:
        config: The application's settings.
        runs_here: Whether all replicas start on this machine, so that engines on its CPU must fit
            its free memory together. An engine on a GPU checks the GPU's memory before it loads.

    Returns:
        The configuration with every `max_context` and default temperature filled in.

    Raises:
        ConfigurationError: If a check fails; one sentence that says what to change.
    """
    check_fetched(models_of(config))
    filled = config
    for part in config.engine_parts.values():
        filled = _put(filled, part.section, _check_pool(part))
    texts = {name: ChatText.load(name) for name in sorted({*_engine_models(config)})}
    first_with: dict[str, ServedModel] = {}
    for model in filled.served:
        if model.config.api.default_temperature is None:
            source = checkpoint_source(model.target.settings.engine.model)
            section = (*(model.section or ("api",)), "default_temperature")
            filled = _put(filled, section, read_temperature(source))
        retriever = model.retriever
        first = first_with.setdefault(retriever.name, model) if retriever else model
        _check_tokens(model, first, texts)
        _check_second_lease(model)
    if runs_here:
        check_fits(cpu_needs(filled), "this machine", free_bytes("cpu"))
    return filled


def check_hub(config: ApplicationConfig) -> None:
    """Check within seconds that all models are here, or that the hub gives them.

    A command asks this first, as `preflight` tries for minutes to reach a hub that is away; with
    all models here, it then does not ask. Replicas that start do well to try.

    Raises:
        ConfigurationError: It does not; one sentence that says why.
    """
    check_available(models_of(config))


def models_of(config: ApplicationConfig) -> list[str]:
    """Return the models of all engines and of embedders, as the configuration names them."""
    retrievers = (model.retriever for model in config.served)
    embedders = (each.settings.retrieval.embedder for each in retrievers if each)
    found = [each.model for each in embedders if not isinstance(each, LexicalEmbedderConfig)]
    return _engine_models(config) + found


def _engine_models(config: ApplicationConfig) -> list[str]:
    return [part.settings.engine.model for part in config.engine_parts.values()]


def cpu_needs(config: ApplicationConfig) -> list[tuple[str, MemoryNeed]]:
    """Return what each engine that starts on this machine's CPU needs, with its name."""
    return [
        (f"{part.key} {engine.model!r}", _need(engine))
        for part in config.engine_parts.values()
        if isinstance(engine := part.settings.engine, EngineConfig)
        if _is_on_cpu(engine, part.settings.pool)
        if part.settings.pool.nodes == 1  # others start elsewhere
        for _ in range(max(1, part.settings.pool.min_replicas))
    ]


def gpu_needs(config: ApplicationConfig) -> list[tuple[str, MemoryNeed]]:
    """Return what each pool's engine needs on each of its GPUs, with its name; vLLM says itself."""
    return [
        (f"{part.key} {engine.model!r}", need)
        for part in config.engine_parts.values()
        if isinstance(engine := part.settings.engine, EngineConfig)
        if part.settings.pool.num_gpus and engine.device != "balanced"
        for need, _ in [
            memory_needs(engine, read_model_facts(engine), on_gpu=True, with_pools=True)
        ]
    ]


def _put(settings: Any, section: Sequence[str], value: object) -> Any:
    """Return settings with `value` in a section."""
    if not section:
        return value
    key, *rest = section
    if isinstance(settings, dict):
        return settings | {key: _put(settings[key], rest, value)}
    return settings.model_copy(update={key: _put(getattr(settings, key), rest, value)})


def _check_tokens(model: ServedModel, first: ServedModel, texts: Mapping[str, ChatText]) -> None:
    """Check that a model's tokens are its drafter's, and those of the first with its retriever."""
    parts = model.target, model.drafter or model.target, first.target
    target, drafter, counted = (texts[part.settings.engine.model] for part in parts)
    try:
        if drafter is not target:
            check_same_vocabulary(target, drafter)
    except ConfigurationError as error:
        prefix = f"{'.'.join(model.section)}: " if model.section else ""
        raise ConfigurationError(f"{prefix}{error}") from error
    try:
        if counted is not target:
            check_same_vocabulary(counted, target)
    except ConfigurationError:
        raise ConfigurationError(
            f"models.{model.name}: the retriever counts in the tokens of models.{first.name}, "
            "which are others: give it a retriever of its own"
        ) from None


def _check_pool(part: AppPart[EnginePoolConfig]) -> EnginePoolConfig:
    """Return the pool with `max_context` filled in, after checking its checkpoint and KV size."""
    engine = part.settings.engine
    try:
        if isinstance(engine, VllmConfig):  # what it runs, in how much memory, vLLM says at start
            check_vllm()
            return part.settings
        _check_weights(engine)
        max_context, _ = plan_pages(engine, read_model_facts(engine).num_positions)
    except ConfigurationError as error:
        raise ConfigurationError(f"{part.key}.engine: {error}") from error
    filled = engine.model_copy(update={"max_context": max_context})
    return part.settings.model_copy(update={"engine": filled})


def _check_second_lease(model: ServedModel) -> None:
    """Check that the target's pool holds its longest text with what is retrieved beside it."""
    config, target = model.config, model.target.settings.engine
    budget = config.retriever.retrieval.budget_tokens or 0
    assert target.max_context is not None
    needed = target.max_context + budget
    if config.takes_two_leases and target.kv_cache_tokens < needed:
        raise ConfigurationError(
            f"{model.target.key}.engine: kv_cache_tokens ({target.kv_cache_tokens}) cannot hold "
            f"max_context ({target.max_context}) and, on a second lease, retrieval.budget_tokens "
            f"({budget}): raise it to {needed}, or lower one of them"
        )


def _need(engine: EngineConfig) -> MemoryNeed:
    need, _ = memory_needs(engine, read_model_facts(engine), on_gpu=False, with_pools=True)
    return need


def _is_on_cpu(engine: EngineConfig, pool: PoolConfig) -> bool:
    """Return whether the engine certainly runs on the CPU.

    With `auto` it takes any GPU that it sees, even one that Ray has not counted.
    """
    if engine.device == "auto":
        return not pool.num_gpus and not any(Path("/dev").glob("nvidia[0-9]*"))
    return engine.device == "cpu"


def _check_weights(engine: EngineConfig) -> None:
    directory = Path(checkpoint_source(engine.model))
    if directory.is_dir() and not any(directory.glob("*.safetensors")):
        raise ConfigurationError(
            f"model {engine.model!r}: the directory holds no safetensors weights"
        )
