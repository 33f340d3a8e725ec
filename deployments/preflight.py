"""What is wrong with a configuration, found before anything starts and without loading weights."""

from __future__ import annotations

from pathlib import Path

from deployments.config import EnginePool, ServeConfig
from rapid.config import EngineConfig
from rapid.engines.checkpoints import checkpoint_source
from rapid.engines.memory import plan_pages
from rapid.engines.model_config import read_model_facts
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
    if isinstance(config.drafter, str):
        return config.model_copy(update={"target": target})
    drafter = _checked("drafter", config.drafter)
    check_same_vocabulary(target_text, ChatText.load(config.drafter.engine.model))
    return config.model_copy(update={"target": target, "drafter": drafter})


def _checked(role: str, pool: EnginePool) -> EnginePool:
    """A pool whose checkpoint is there and can be run, and whose KV holds one sequence."""
    engine = pool.engine
    try:
        _check_weights(engine)
        max_context, _ = plan_pages(engine, read_model_facts(engine).num_positions)
    except ConfigurationError as error:
        raise ConfigurationError(f"{role}.engine: {error}") from error
    filled = engine.model_copy(update={"max_context": max_context})
    return pool.model_copy(update={"engine": filled})


def _check_weights(engine: EngineConfig) -> None:
    directory = Path(checkpoint_source(engine.model))
    if directory.is_dir() and not any(directory.glob("*.safetensors")):
        raise ConfigurationError(
            f"model {engine.model!r}: the directory holds no safetensors weights"
        )
