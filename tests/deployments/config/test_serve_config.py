from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from deployments.app import compose
from deployments.config.serve_config import ServeConfig
from deployments.config.serve_file import check
from deployments.pools.engine_actor import load_engine
from rapid.catalogue import CatalogueFile, find
from rapid.config import EngineConfig
from rapid.errors import ConfigurationError
from rapid.planning.shapes import KNOWN_SHAPES
from tests.deployments.test_app import graph
from tests.rapid import tiny_gguf

ROOT = Path(__file__).parents[3]
FILES = [ROOT / "serve_config.yaml", *sorted((ROOT / "cluster" / "configs").glob("*.yaml"))]


def args_of(path: Path) -> dict[str, Any]:
    (application,) = yaml.safe_load(path.read_text())["applications"]
    assert application["import_path"] == "deployments.app:build"
    args: dict[str, Any] = application["args"]
    return args


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_configuration_of_the_repository_is_valid(path: Path) -> None:
    config = ServeConfig.model_validate(args_of(path))
    deployments = graph(compose(config))
    assert set(deployments) >= {"Ingress", "Orchestrator", "Target", "Retriever"}
    assert ("Drafter" in deployments) == (config.drafter != "target")


def test_the_configurations_are_what_they_say() -> None:
    configs = {path.stem: ServeConfig.model_validate(args_of(path)) for path in FILES}
    assert len(configs) == 5
    upward = configs["llama-3.1-8b-with-70b-drafter"]
    assert upward.target.pool.num_gpus == 1
    assert upward.drafter_pool.pool.num_gpus == 4
    drafter = graph(compose(upward))["Drafter"]._bound_deployment
    assert drafter._replica_config.placement_group_bundles[0]["GPU"] == 4
    assert upward.drafter_pool.engine.device == "balanced"
    assert configs["one-gpu-self-speculation"].drafter == "target"
    assert configs["laptop-qwen2.5"].target.pool.num_gpus == 0
    own = configs["own-text"]
    assert own.drafter == "target"
    for name in (own.target.engine.model, own.retriever.retrieval.embedder.model):
        entry = find(name)
        assert isinstance(entry, CatalogueFile)
        assert f"rapid models get {own.target.engine.model}" in (ROOT / "Makefile").read_text()
        assert name in (ROOT / "Makefile").read_text()
    assert own.target.pool.num_gpus == 0


def test_own_text_passes_the_door_once_its_models_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAPID_HOME", str(tmp_path))
    path = ROOT / "cluster" / "configs" / "own-text.yaml"
    target, embedder = find("smollm2-135m"), find("all-minilm-l6-v2")
    with pytest.raises(ConfigurationError, match="run `rapid models get smollm2-135m`"):
        check(path)
    target.path.parent.mkdir(parents=True)
    long = {"llama.context_length": target.context_tokens}
    tiny_gguf.write(target.path, more=long)
    with pytest.raises(ConfigurationError, match="run `rapid models get all-minilm-l6-v2`"):
        check(path)
    embedder.path.mkdir(parents=True)
    assert check(path).target.engine.max_context == 8192


def test_the_embedded_configuration_fits_two_cores() -> None:
    config = ServeConfig.model_validate(args_of(FILES[0]))
    pools = [
        config.target.pool,
        config.drafter_pool.pool,
        config.retriever.pool,
        config.orchestrator.pool,
        config.api.pool,
    ]
    assert all(pool.num_cpus <= 0.1 and pool.num_gpus == 0 for pool in pools)
    assert sum(pool.num_cpus * pool.max_replicas for pool in pools) < 2


def test_the_embedded_configuration_passes_the_door() -> None:
    config = check(FILES[0])
    assert config.target.engine.max_context is not None


Change = Callable[[dict[str, Any], dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda _, args: args["target"]["engine"].update(kv_cache=5),
            "target.engine.kv_cache: unknown key; did you mean kv_cache_tokens?",
        ),
        (
            lambda _, args: args["drafter"]["engine"].update(page_tokens=0),
            "drafter.engine.page_tokens: Input should be greater than or equal to 1",
        ),
        (
            lambda _, args: args["target"]["engine"].update(kv_cache_tokens=100),
            "kv_cache_tokens (100) cannot hold one sequence of max_context (4096): raise",
        ),
        (
            lambda _, args: args["target"]["engine"].update(model="/nowhere/at/all"),
            "'/nowhere/at/all': there is no such checkpoint directory",
        ),
        (lambda _, args: args.pop("target"), "target: Field required"),
        (lambda _, args: args.update(drafter="nobody"), "drafter: Input should be 'target'"),
        (
            lambda _, args: (
                args.update(drafter="target"),
                args["target"]["engine"].update(max_leases=1),
            ),
            "two leases a request: raise target.engine.max_leases",
        ),
        (
            lambda _, args: args["target"]["engine"].update(deterministic=True),
            "deterministic is set on one of target and drafter",
        ),
        (
            lambda _, args: args.update(drafter="prompt_lookup"),
            "prompt_lookup retrieves nothing: leave retriever out",
        ),
        (
            lambda _, args: args.update(speculation={"rule": "paper"}),
            "speculation.rule is not for servers: requests ask for rapid.mode 'paper'",
        ),
        (
            lambda _, args: args["retriever"]["pool"].update(max_replicas=2),
            "a local store lives in one retriever: set retriever.pool.max_replicas to 1",
        ),
        (
            lambda _, args: args["retriever"]["retrieval"].update(budget_tokens=4000),
            "fills the drafter's max_context (2048): raise drafter.engine.max_context",
        ),
        (
            lambda _, args: args["api"].update(keys=[{"tenant": "a", "sha256": "secret"}]),
            "api.keys.0.sha256: String should match pattern",
        ),
        (
            lambda _, args: args["api"].update(
                keys=[{"tenant": tenant, "sha256": "0" * 64} for tenant in "ab"]
            ),
            "lists the same key twice",
        ),
        (
            lambda file, _: file["http_options"].update(host="0.0.0.0"),
            "api.keys is empty",
        ),
        (
            lambda file, _: file.update(http_options=["host: 0.0.0.0"]),
            "http_options must be a mapping",
        ),
        (
            lambda _, args: args["target"]["engine"].update(max_context=9000, kv_cache_tokens=9000),
            "target.engine: max_context 9000 is beyond the 8192 positions of 'embedded:target'",
        ),
        (
            lambda _, args: args["drafter"]["engine"].update(kv_cache_tokens=2063, page_tokens=999),
            "drafter.engine: KV pool too small for one sequence of 'embedded:drafter'",
        ),
        (
            lambda _, args: args["target"]["engine"].update(
                rope_scaling={"type": "dynamic", "factor": 2.0}
            ),
            "rope_type 'dynamic' changes stored keys",
        ),
        (
            lambda _, args: args["target"]["engine"].update(
                rope_scaling={"type": "linear", "factor": "abc"}
            ),
            "rope_scaling: factor must be a number of at least 1, not 'abc'",
        ),
        (
            lambda _, args: args["target"]["engine"].update(device="mps"),
            "target.engine.device: device 'mps' is not supported",
        ),
        (lambda file, _: file.update(applications=[]), "one application with import_path"),
    ],
)
def test_a_mistake_is_refused_with_one_readable_message(
    tmp_path: Path, change: Change, message: str
) -> None:
    file = copy.deepcopy(yaml.safe_load(FILES[0].read_text()))
    change(file, file["applications"][0]["args"])
    path = tmp_path / "mistaken.yaml"
    path.write_text(yaml.safe_dump(file))
    with pytest.raises(ConfigurationError) as refused:
        check(path)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "Traceback" not in str(refused.value)


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    file = yaml.safe_load(FILES[0].read_text())
    args = file["applications"][0]["args"]
    args["target"]["engine"]["page_tokens"] = 0
    args["speculation"]["eta"] = -1
    path = tmp_path / "mistaken.yaml"
    path.write_text(yaml.safe_dump(file))
    with pytest.raises(ConfigurationError) as refused:
        check(path)
    assert len(str(refused.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [("a: [", "is not YAML"), ("", "is empty"), ("- 1", "is empty"), (None, "cannot be read")],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "file.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match=message):
        check(path)


def test_two_models_that_mean_different_things_are_refused(tmp_path: Path) -> None:
    """The drafter's tokens are the target's with two swapped."""
    import json
    import shutil

    from rapid.embedded import DRAFTER

    swapped = tmp_path / "drafter"
    shutil.copytree(DRAFTER, swapped)
    tokenizer = json.loads((swapped / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[100:102]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (swapped / "tokenizer.json").write_text(json.dumps(tokenizer))

    file = yaml.safe_load(FILES[0].read_text())
    file["applications"][0]["args"]["drafter"]["engine"]["model"] = str(swapped)
    path = tmp_path / "mistaken.yaml"
    path.write_text(yaml.safe_dump(file))
    with pytest.raises(ConfigurationError, match="different vocabularies: token id"):
        check(path)


def test_a_checkpoint_without_weights_is_refused(tmp_path: Path) -> None:
    import shutil

    from rapid.embedded import TARGET

    hollow = tmp_path / "target"
    shutil.copytree(TARGET, hollow, ignore=shutil.ignore_patterns("*.safetensors"))
    file = yaml.safe_load(FILES[0].read_text())
    file["applications"][0]["args"]["target"]["engine"]["model"] = str(hollow)
    path = tmp_path / "mistaken.yaml"
    path.write_text(yaml.safe_dump(file))
    with pytest.raises(ConfigurationError, match="holds no safetensors weights"):
        check(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "supported are llama, qwen2, qwen3"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0,
             "sliding_window": 64},
            "sliding windows",
        ),
    ],
)  # fmt: skip
def test_a_checkpoint_that_engines_cannot_run_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    import json
    import shutil

    from rapid.embedded import TARGET

    other = tmp_path / "target"
    shutil.copytree(TARGET, other)
    settings = {k: v for k, v in json.loads((other / "config.json").read_text()).items()
                if k != "layer_types"}  # fmt: skip
    (other / "config.json").write_text(json.dumps(settings | changes))
    file = yaml.safe_load(FILES[0].read_text())
    file["applications"][0]["args"]["target"]["engine"]["model"] = str(other)
    path = tmp_path / "mistaken.yaml"
    path.write_text(yaml.safe_dump(file))
    with pytest.raises(ConfigurationError, match=f"target.engine: .*{message}"):
        check(path)


class TestMemory:
    """What is known before anything starts: engines on this machine's CPU, all together."""

    @pytest.fixture
    def free(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)

        def say(num_bytes: int) -> None:
            monkeypatch.setattr("deployments.config.preflight.free_bytes", lambda device: num_bytes)

        return say

    def changed(self, tmp_path: Path, **engine: object) -> Path:
        file = yaml.safe_load(FILES[0].read_text())
        for role in ("target", "drafter"):
            file["applications"][0]["args"][role]["engine"].update(engine)
        path = tmp_path / "changed.yaml"
        path.write_text(yaml.safe_dump(file))
        return path

    def test_what_does_not_fit_together_is_refused_with_numbers(self, tmp_path, free) -> None:
        path = self.changed(tmp_path, device="cpu")
        free(2**30)
        check(path)
        free(100 * 2**20)
        with pytest.raises(ConfigurationError, match="100 MiB are free; lower kv_") as caught:
            check(path)
        for part in ("target 'embedded:target'", "drafter 'embedded:drafter'", "KV pool 128 MiB"):
            assert part in str(caught.value)

    def test_a_gpu_s_memory_is_not_known_here(self, tmp_path, free) -> None:
        free(0)
        check(self.changed(tmp_path, device="cuda"))

    def test_nor_that_of_a_cluster(self, tmp_path, free, monkeypatch) -> None:
        free(0)
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
        check(self.changed(tmp_path, device="cpu"))

    def test_an_engine_counts_its_pool_before_it_loads(self, monkeypatch) -> None:
        monkeypatch.setattr("rapid.engines.forward.loading.free_bytes", lambda device: 2**30)
        config = EngineConfig(model="embedded:target", device="cpu", kv_cache_tokens=2**20)
        with pytest.raises(ConfigurationError, match=r"KV pool 2.0 GiB.*lower kv_cache_tokens"):
            load_engine(config)

    def test_the_gpu_configurations_fit_80_gb(self) -> None:
        """With the 70B's over its four."""
        configs = {path.stem: ServeConfig.model_validate(args_of(path)) for path in FILES}
        one_gpu = configs["one-gpu-self-speculation"].target.engine
        upward = configs["llama-3.1-8b-with-70b-drafter"]
        for engine, name, num_gpus in (
            (one_gpu, "llama-3.1-8b", 1),
            (upward.target.engine, "llama-3.1-8b", 1),
            (upward.drafter_pool.engine, "llama-3.1-70b", 4),
        ):
            _, shape = KNOWN_SHAPES[name]
            pool = engine.kv_cache_tokens * shape.kv_bytes_per_token()
            workspace = shape.workspace_bytes(engine.step_tokens, engine.max_leases, on_gpu=True)
            assert shape.weight_bytes() + pool + workspace < num_gpus * 0.9 * 80e9


def test_a_gpu_may_be_on_another_machine(tmp_path: Path) -> None:
    file = yaml.safe_load(FILES[0].read_text())
    file["applications"][0]["args"]["target"]["engine"]["device"] = "cuda"
    path = tmp_path / "elsewhere.yaml"
    path.write_text(yaml.safe_dump(file))
    assert check(path).target.engine.device == "cuda"


def test_no_error_shows_a_stores_key() -> None:
    args = args_of(FILES[0])
    store = {"kind": "server", "url": "qdrant:6333", "api_key": "SECRETKEY"}
    args["retriever"]["retrieval"]["store"] = store
    with pytest.raises(ValidationError) as refused:
        ServeConfig.model_validate(args)
    assert "SECRETKEY" not in str(refused.value)
    assert "store.url 'qdrant:6333' is no URL" in str(refused.value)
