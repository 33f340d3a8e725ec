"""The pairs of the RAPID paper as configurations: settings, memory, and their command of a plan."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.config.pools.pool_settings import EnginePoolConfig
from deployments.config.serve_config import ServeConfig
from rapid.checkpoints.facts import read_model_facts
from rapid.checkpoints.memory import memory_needs, plan_pages
from rapid.planning.gpus import GPUS
from rapid.planning.known_models import KNOWN_SHAPES
from rapid.planning.plan import USABLE
from tests.deployments.cli.command import rapid

CONFIGS = Path(__file__).parents[3] / "cluster" / "configs"
LLAMA = "meta-llama/Llama-3.1-{}-Instruct"
QWEN = "Qwen/Qwen2.5-{}-Instruct"
ROWS = {  # target and drafter
    "one-gpu-self-speculation": (LLAMA.format("8B"), None),
    "llama-3.1-70b-self-speculation": (LLAMA.format("70B"), None),
    "llama-3.1-8b-with-70b-drafter": (LLAMA.format("8B"), LLAMA.format("70B")),
    "llama-3.1-8b-with-70b-drafter-int4": (LLAMA.format("8B"), LLAMA.format("70B")),
    "qwen2.5-7b-self-speculation": (QWEN.format("7B"), None),
    "qwen2.5-72b-self-speculation": (QWEN.format("72B"), None),
    "qwen2.5-7b-with-72b-drafter": (QWEN.format("7B"), QWEN.format("72B")),
}
PUBLISHED = {  # what the config.json of the families says beside the shape
    "meta-llama": {
        "model_type": "llama",
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "Qwen": {"model_type": "qwen2", "max_position_embeddings": 32768},
}


def settings_of(name: str) -> ServeConfig:
    (application,) = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["applications"]
    return ServeConfig.model_validate(application["args"])


def with_checkpoint(pool: EnginePoolConfig, directory: Path) -> EnginePoolConfig:
    """The same settings with the model's config.json at hand."""
    (shape,) = [shape for name, shape in KNOWN_SHAPES.values() if name == pool.engine.model]
    settings: dict[str, Any] = PUBLISHED[pool.engine.model.split("/")[0]] | {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "torch_dtype": "bfloat16",
    }
    path = directory / pool.engine.model
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(settings))
    engine = pool.engine.model_copy(update={"model": str(path)})
    assert read_model_facts(engine).shape == shape
    return pool.model_copy(update={"engine": engine})


@pytest.mark.parametrize("name", ROWS)
def test_every_pair_of_the_paper_has_a_configuration_that_fits_80_gb(
    name: str, tmp_path: Path
) -> None:
    """On each GPU: its part of the weights and the KV, and the work of the largest step."""
    config = settings_of(name)
    target, drafter = ROWS[name]
    assert config.target.engine.model == target
    pools = [config.target]
    if drafter is None:
        assert config.drafter == "target"
    else:
        assert config.drafter_pool.engine.model == drafter
        pools.append(config.drafter_pool)
    for pool in pools:
        engine = with_checkpoint(pool, tmp_path).engine
        facts = read_model_facts(engine)  # refuses heads that the ranks do not divide
        assert engine.dtype == facts.dtype == "bfloat16"
        max_context, _ = plan_pages(engine, facts.num_positions)
        need, _ = memory_needs(engine, facts, on_gpu=True, with_pools=True)
        assert need.total <= USABLE * GPUS["h100-sxm"].memory
        assert engine.tensor_parallel == pool.pool.num_gpus
        assert max_context == (131072 if pool is config.target else 16384)


@pytest.mark.parametrize("name", ROWS)
def test_the_plan_that_a_configuration_names_fits_its_pool(name: str) -> None:
    said = (CONFIGS / f"{name}.yaml").read_text()
    (command,) = re.findall(r"^#   rapid (plan (?:.*\\\n#)*.*)$", said, flags=re.MULTILINE)
    options = shlex.split(command.replace("\\\n#", " "))
    result = rapid(*options)
    assert result.exit_code == 0, result.stderr
    config = settings_of(name)
    given = dict(zip(options[1::2], options[2::2], strict=True))
    names = {key: name for key, (name, _) in KNOWN_SHAPES.items()}
    assert (names[given["--target"]], names[given["--drafter"]]) == (
        config.target.engine.model,
        config.drafter_pool.engine.model,
    )
    drafter_gpus = 0 if config.drafter == "target" else config.drafter_pool.pool.num_gpus
    assert float(given["--target-gpus"]) == config.target.pool.num_gpus
    assert float(given["--drafter-gpus"]) == drafter_gpus
    sequences = int(given["--batch"]) * int(given["--context"])
    assert sequences <= config.target.engine.kv_cache_tokens
