"""What is wrong with a configuration, found before anything starts and without loading weights."""

from __future__ import annotations

from pathlib import Path

from deployments.config import EnginePool, ServeConfig
from rapid.config import EngineConfig
from rapid.engines.checkpoints import checkpoint_source, read_json
from rapid.engines.text import ChatText
from rapid.engines.vocabulary import check_same_vocabulary
from rapid.errors import ConfigurationError


def preflight(config: ServeConfig) -> ServeConfig:
    """Check the checkpoints against the configuration and each other.

    Returns:
        The configuration with every `max_context` filled in.

    Raises:
        ConfigurationError: one sentence that says what to change.
    """
    target = _checked("target", config.target)
    target_text = ChatText.load(config.target.engine.model)
    if config.drafter == "target":
        return config.model_copy(update={"target": target})
    drafter = _checked("drafter", config.drafter)
    check_same_vocabulary(target_text, ChatText.load(config.drafter.engine.model))
    return config.model_copy(update={"target": target, "drafter": drafter})


def _checked(role: str, pool: EnginePool) -> EnginePool:
    """A pool whose checkpoint is there and whose KV holds one sequence."""
    engine = pool.engine
    source = checkpoint_source(engine.model)
    model_config = read_json(source, "config.json")
    if model_config is None:
        raise ConfigurationError(
            f"{role}.engine.model {engine.model!r}: no config.json could be found; give the path "
            "of a checkpoint directory or a model that the hub's cache holds"
        )
    if Path(source).is_dir() and not any(Path(source).glob("*.safetensors")):
        raise ConfigurationError(
            f"{role}.engine.model {engine.model!r}: the directory holds no safetensors weights"
        )
    max_context = engine.max_context or _positions(engine, model_config)
    if engine.kv_cache_tokens < max_context:
        raise ConfigurationError(
            f"{role}.engine.kv_cache_tokens ({engine.kv_cache_tokens}) cannot hold one sequence of "
            f"max_context ({max_context}): raise it or set a lower {role}.engine.max_context"
        )
    filled = engine.model_copy(update={"max_context": max_context})
    return pool.model_copy(update={"engine": filled})


def _positions(engine: EngineConfig, model_config: dict[str, object]) -> int:
    """How far the checkpoint's positions reach, after `rope_scaling`."""
    positions = int(str(model_config["max_position_embeddings"]))
    scaling = engine.rope_scaling
    if scaling is None:
        return positions
    original = float(str(scaling.get("original_max_position_embeddings", positions)))
    return max(positions, int(original * float(str(scaling.get("factor", 1.0)))))
