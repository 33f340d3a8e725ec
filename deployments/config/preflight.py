"""Checks of a configuration that need its checkpoints but neither load weights nor start Ray."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cluster.placement import PoolConfig
from deployments.config.serve_config import EnginePoolConfig, ServeConfig
from rapid.catalogue import local_path
from rapid.checkpoints.facts import read_model_facts
from rapid.checkpoints.files import checkpoint_source, read_temperature
from rapid.checkpoints.memory import check_fits, free_bytes, memory_needs, plan_pages
from rapid.checkpoints.text import ChatText
from rapid.checkpoints.vocabulary import check_same_vocabulary
from rapid.config import EngineConfig
from rapid.errors import ConfigurationError
from rapid.planning.plan import MemoryNeed
from retrieval.settings import LexicalEmbedderConfig


def preflight(config: ServeConfig, *, runs_here: bool = False) -> ServeConfig:
    """Check the checkpoints against the configuration and each other.

    Args:
        config: The application's settings.
        runs_here: Whether all replicas start on this machine, so that engines on its CPU must fit
            its free memory together. An engine on a GPU checks the GPU's memory before it loads.

    Returns:
        The configuration with every `max_context` and the default temperature filled in.

    Raises:
        ConfigurationError: If a check fails; one sentence that says what to change.
    """
    filled = {"target": _check_pool("target", config.target)}
    api = config.api
    if api.default_temperature is None:
        temperature = read_temperature(checkpoint_source(config.target.engine.model))
        api = api.model_copy(update={"default_temperature": temperature})
    target_text = ChatText.load(config.target.engine.model)
    if not isinstance(config.drafter, str):
        filled["drafter"] = _check_pool("drafter", config.drafter)
        check_same_vocabulary(target_text, ChatText.load(config.drafter.engine.model))
    _check_second_lease(config, filled["target"].engine)
    embedder = config.retriever.retrieval.embedder
    if not isinstance(embedder, LexicalEmbedderConfig):
        local_path(embedder.model)  # refuses a model of the catalogue that has not been fetched
    if runs_here:
        _check_memory(filled)
    return config.model_copy(update=filled | {"api": api})


def _check_pool(role: str, pool: EnginePoolConfig) -> EnginePoolConfig:
    """Return the pool with `max_context` filled in, after checking its checkpoint and KV size."""
    engine = pool.engine
    try:
        _check_weights(engine)
        max_context, _ = plan_pages(engine, read_model_facts(engine).num_positions)
    except ConfigurationError as error:
        raise ConfigurationError(f"{role}.engine: {error}") from error
    filled = engine.model_copy(update={"max_context": max_context})
    return pool.model_copy(update={"engine": filled})


def _check_second_lease(config: ServeConfig, target: EngineConfig) -> None:
    """Check that the target's pool holds its longest text with what is retrieved beside it."""
    budget = config.retriever.retrieval.budget_tokens or 0
    assert target.max_context is not None
    needed = target.max_context + budget
    if config.takes_two_leases and target.kv_cache_tokens < needed:
        raise ConfigurationError(
            f"target.engine: kv_cache_tokens ({target.kv_cache_tokens}) cannot hold max_context "
            f"({target.max_context}) and, on a second lease, retrieval.budget_tokens ({budget}): "
            f"raise it to {needed}, or lower one of them"
        )


def _check_memory(pools: Mapping[str, EnginePoolConfig]) -> None:
    """Check that all engines that start on this machine's CPU fit its free memory together."""
    needs = [
        (f"{role} {pool.engine.model!r}", _need(pool.engine))
        for role, pool in pools.items()
        if _is_on_cpu(pool.engine, pool.pool) and pool.pool.nodes == 1  # others start elsewhere
        for _ in range(max(1, pool.pool.min_replicas))
    ]
    check_fits(needs, "this machine", free_bytes("cpu"))


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
