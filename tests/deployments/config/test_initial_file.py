"""Files that `rapid init` writes: valid, within the memory, and with a plan that says the same."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from deployments.config.initial_file import Wishes, compose_file
from deployments.config.pools.pool_settings import EnginePoolConfig
from deployments.config.serve_config import ServeConfig
from deployments.config.serve_file import read_applications
from rapid.checkpoints.facts import read_model_facts
from rapid.checkpoints.memory import memory_needs, plan_pages
from rapid.planning.division import divide
from rapid.planning.gpus import GPU, GPUS
from rapid.planning.known_models import KNOWN_SHAPES
from rapid.planning.plan import USABLE
from tests.deployments.cli.command import rapid

SHIPPED = Path(__file__).parents[3] / "cluster/configs/four-h100-qwen3.yaml"
SHAPES = dict(KNOWN_SHAPES.values())
CASES = [
    ("h100-sxm", 1, Wishes(30_000, 40)),
    ("h100-sxm", 2, Wishes(60_000, 40)),
    ("h100-sxm", 4, Wishes(125_000, 60)),
    ("l4", 4, Wishes(20_000, 20)),
    ("b200", 8, Wishes(128_000, 200)),
]


def write(gpu: str, num_gpus: int, wishes: Wishes) -> str:
    demand = wishes.demand(0.77)
    division = divide(GPUS[gpu], num_gpus, demand)
    assert division is not None
    return compose_file(wishes, demand, division, [])


def published(engine_pool: EnginePoolConfig, folder: Path) -> EnginePoolConfig:
    """The same settings with the model's config.json at hand."""
    engine = engine_pool.engine
    shape = SHAPES[engine.model]
    path = folder / engine.model
    path.mkdir(parents=True, exist_ok=True)
    settings = {
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied_embeddings,
        "max_position_embeddings": 40_960,
        "torch_dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(settings))
    return engine_pool.model_copy(update={"engine": engine.model_copy(update={"model": str(path)})})


def check_memory(engine_pool: EnginePoolConfig, gpu: GPU, folder: Path) -> None:
    """As an engine checks it: every GPU's part of the weights, the KV and the largest step."""
    engine = published(engine_pool, folder).engine
    facts = read_model_facts(engine)
    assert facts.shape == SHAPES[engine_pool.engine.model]
    plan_pages(engine, facts.num_positions)
    need, _ = memory_needs(engine, facts, on_gpu=True, with_pools=True)
    assert need.total <= USABLE * gpu.memory
    assert engine.tensor_parallel == engine_pool.pool.num_gpus


@pytest.mark.parametrize(("gpu", "num_gpus", "wishes"), CASES)
def test_a_file_is_valid_and_fits_the_memory(gpu, num_gpus, wishes, tmp_path):
    (config,) = read_applications(yaml.safe_load(write(gpu, num_gpus, wishes))).values()
    assert isinstance(config, ServeConfig)
    parts = config.engine_parts.values()
    used = sum(part.settings.pool.num_gpus * part.settings.pool.max_replicas for part in parts)
    assert used <= num_gpus
    for part in parts:
        check_memory(part.settings, GPUS[gpu], tmp_path)
    target, budget = config.target.engine, config.retriever.retrieval
    assert target.max_context >= wishes.document_tokens
    held = target.max_leases // 2 * (target.max_context + budget.budget_for(wishes.document_tokens))
    assert held <= target.kv_cache_tokens


@pytest.mark.parametrize(("gpu", "num_gpus", "wishes"), CASES)
def test_the_plan_that_it_names_says_that_it_fits(gpu, num_gpus, wishes):
    text = write(gpu, num_gpus, wishes)
    (command,) = re.findall(r"^#   rapid (plan (?:.*\\\n#)*.*)$", text, flags=re.MULTILINE)
    result = rapid(*shlex.split(command.replace("\\\n#", " ")))
    assert result.exit_code == 0, result.stderr


def test_the_shipped_one_is_what_the_command_at_its_head_writes(tmp_path):
    shipped = SHIPPED.read_text(encoding="utf-8")
    (command,) = re.findall(r"^#   rapid (init .*)$", shipped, flags=re.MULTILINE)
    written = tmp_path / "written.yaml"
    result = rapid(*shlex.split(command), str(written), "--teams", "0")
    assert result.exit_code == 0, result.output
    assert written.read_text(encoding="utf-8") == shipped
