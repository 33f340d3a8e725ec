from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from deployments.api.ingress import Ingress
from deployments.app import compose
from deployments.config.api_config import ApiConfig, ApiKey
from deployments.config.named_models import ModelsConfig
from deployments.config.pools.library_pool import LibraryPoolConfig
from deployments.config.pools.pool_settings import RetrieverPoolConfig
from deployments.config.serve_config import ServeConfig
from deployments.config.serve_file import check
from rapid.catalogue import CatalogueFile, find
from rapid.errors import ConfigurationError
from retrieval.settings import BGEM3EmbedderConfig
from tests.deployments.test_app import graph
from tests.rapid import tiny_gguf

ROOT = Path(__file__).parents[3]
EMBEDDED, MAKEFILE = ROOT / "serve_config.yaml", (ROOT / "Makefile").read_text()
CONFIGS = ROOT / "cluster" / "configs"
BOTH = CONFIGS / "with-own-text.yaml"
OWN_TEXT = CONFIGS / "own-text.yaml"
FILES = [EMBEDDED, *sorted({*CONFIGS.glob("*.yaml")} - {BOTH})]


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
    assert len(configs) == 13
    upward = configs["llama-3.1-8b-with-70b-drafter"]
    assert upward.target.pool.num_gpus == 1
    assert upward.drafter_pool.pool.num_gpus == 4
    drafter = graph(compose(upward))["Drafter"]._bound_deployment
    assert drafter._replica_config.placement_group_bundles[0]["GPU"] == 4
    assert upward.drafter_pool.engine.tensor_parallel == 4
    small = configs["llama-3.1-8b-with-70b-drafter-int4"].drafter_pool
    assert (small.engine.quantization, small.pool.num_gpus) == ("int4", 1)
    assert small.engine.model == upward.drafter_pool.engine.model
    two = configs["two-processes"]
    assert two.target.engine.tensor_parallel == two.drafter_pool.engine.tensor_parallel == 2
    assert configs["one-gpu-self-speculation"].drafter == "target"
    assert configs["laptop-qwen2.5"].target.pool.num_gpus == 0
    coder = configs["laptop-qwen2.5-coder"]
    engines = (coder.target.engine, coder.drafter_pool.engine)
    assert [find(engine.model).name for engine in engines] == [
        "qwen2.5-coder-0.5b",
        "qwen2.5-coder-1.5b",
    ]
    own = configs["own-text"]
    assert own.drafter == "target"
    for name in (own.target.engine.model, own.retriever.retrieval.embedder.model):
        assert isinstance(find(name), CatalogueFile)
    assert own.target.pool.num_gpus == 0


def test_both_small_systems_together_are_what_each_is_alone() -> None:
    both = ModelsConfig.model_validate(args_of(BOTH))
    alone = [ServeConfig.model_validate(args_of(path)) for path in (EMBEDDED, OWN_TEXT)]
    assert [model.name for model in both.served] == [each.api.model for each in alone]
    for together, config in zip(both.served, alone, strict=True):
        for part in ("target", "drafter", "retriever", "speculation"):
            assert getattr(together.config, part) == getattr(config, part)
        assert together.card.default_temperature == config.api.default_temperature
    assert both.library == alone[0].library
    assert f"CONFIG ?= {BOTH.relative_to(ROOT)} --fallback {EMBEDDED.name}\n" in MAKEFILE


def test_own_text_passes_the_door_once_its_models_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAPID_HOME", str(tmp_path))
    path = OWN_TEXT
    target, embedder = find("smollm2-135m"), find("all-minilm-l6-v2")
    with pytest.raises(ConfigurationError, match="models get smollm2-135m all-minilm-l6-v2`"):
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


def test_no_error_shows_a_stores_key() -> None:
    args = args_of(FILES[0])
    store = {"kind": "server", "url": "qdrant:6333", "api_key": "SECRETKEY"}
    args["retriever"]["retrieval"]["store"] = store
    with pytest.raises(ValidationError) as refused:
        ServeConfig.model_validate(args)
    assert "SECRETKEY" not in str(refused.value)
    assert "store.url 'qdrant:6333' is no URL" in str(refused.value)


def with_api(**api: Any) -> ServeConfig:
    args = args_of(EMBEDDED)
    usual = {"shared_requests": None}  # which the file sets
    return ServeConfig.model_validate(args | {"api": args["api"] | usual | api})


def keys_of(*tenants: str) -> list[dict[str, str]]:
    return [{"tenant": each, "sha256": f"{n:064x}"} for n, each in enumerate(tenants)]


def test_a_partial_pool_keeps_the_defaults_of_its_deployment() -> None:
    """A block with another key reset the requests at once from 256 to 64."""
    config = with_api(pool={"max_replicas": 3})
    assert (config.api.pool.max_ongoing_requests, config.api.pool.max_replicas) == (256, 3)
    assert config.orchestrator.pool.max_ongoing_requests == 256
    assert config.orchestrator.pool.target_ongoing_requests == 64
    for name in ("Ingress", "Orchestrator"):
        deployment = graph(compose(config))[name]._bound_deployment
        assert deployment.max_ongoing_requests == 256
        assert deployment.max_queued_requests == 256


@pytest.mark.parametrize(
    ("api", "most", "shared"),
    [
        ({}, None, None),  # one tenant: all places are its own
        ({"keys": keys_of("a", "a")}, None, None),
        # 16 leases of each of two targets, two to a request: 16 answers at once, and as many wait.
        # Targets are crowded from 8 leases on.
        ({"keys": keys_of("a", "b")}, 32, 8),
        ({"keys_env": "KEYS"}, 32, 8),
        ({"keys": keys_of("a", "b"), "max_requests_per_tenant": 3}, 3, 8),
        ({"keys": keys_of("a", "b"), "shared_requests": 5}, 32, 5),
        ({"shared_requests": 5}, None, 5),
        ({"max_requests_per_tenant": 3}, 3, None),
        ({"keys": keys_of("a", "b"), "pool": {"max_ongoing_requests": 8}}, 4, 8),
    ],
)
def test_tenants_share_what_can_be_answered_at_once(
    api: dict[str, Any], most: int | None, shared: int | None
) -> None:
    config = with_api(**api).model_copy(update={"library": None})
    filled = config.filled_api
    assert (filled.max_requests_per_tenant, filled.shared_requests) == (most, shared)
    assert filled.max_requests == 0.75 * filled.pool.max_ongoing_requests


def test_a_server_whose_library_may_have_keys_of_others_shares_with_one_tenant_listed() -> None:
    for keys, expected in (((), (None, None)), (keys_of("ops"), (32, 8))):
        filled = with_api(keys=keys).model_copy(update={"library": LibraryPoolConfig()}).filled_api
        assert (filled.max_requests_per_tenant, filled.shared_requests) == expected


def test_the_context_that_is_told_is_the_one_that_is_configured() -> None:
    def told(**api: Any) -> int | None:
        return with_api(**api).filled_api.cards["rapid-embedded"].max_model_len

    assert told() == with_api().target.engine.max_context == 4096
    assert told(max_model_len=7) == 7


def test_the_most_characters_follow_from_the_context() -> None:
    assert with_api().filled_api.max_characters == 2**20
    assert with_api(max_characters=7).filled_api.max_characters == 7
    assert with_api(silence_s=7).filled_api.silence_s == 7
    waits = with_api().orchestrator
    longest_s = waits.target_wait_s + waits.retrieval_wait_s + waits.drafter_wait_s
    assert with_api().filled_api.silence_s == longest_s
    upward = next(path for path in FILES if path.stem == "llama-3.1-8b-with-70b-drafter")
    filled = ServeConfig.model_validate(args_of(upward)).filled_api
    assert filled.max_characters == 16 * 131_072
    ingress = graph(compose(with_api()))["Ingress"]._bound_deployment
    assert ingress.init_args[0].max_characters == 2**20


@pytest.mark.parametrize(("num_gpus", "device"), [(0, "cpu"), (0.25, "cuda")])
def test_the_embedder_takes_the_gpu_of_its_pool_and_no_other(num_gpus: float, device: str) -> None:
    """Ray does not hide the GPUs of a machine from a replica that has reserved none."""
    retriever = RetrieverPoolConfig.model_validate(
        {"retrieval": {"embedder": {"kind": "bge-m3"}}, "pool": {"num_gpus": num_gpus}}
    )
    assert retriever.retrieval.embedder == BGEM3EmbedderConfig(kind="bge-m3", device="auto")
    assert retriever.placed.embedder == BGEM3EmbedderConfig(kind="bge-m3", device=device)
    words = RetrieverPoolConfig()
    assert words.placed is words.retrieval


class TestKeysOfTheEnvironment:
    LISTED = ApiKey(tenant="listed", sha256="a" * 64)
    CONFIG = ApiConfig(keys=(LISTED,), keys_env="THE_KEYS")

    def test_they_are_added_to_those_of_the_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("THE_KEYS", json.dumps([{"tenant": "secret", "sha256": "b" * 64}]))
        tenants = [key.tenant for key in self.CONFIG.all_keys()]
        assert tenants == ["listed", "secret"]
        assert ApiConfig(keys=(self.LISTED,)).all_keys() == (self.LISTED,)

    @pytest.mark.parametrize("value", [None, "", "[]", "{}", '[{"tenant": "t", "sha256": "tell"}]'])
    def test_an_ingress_without_them_does_not_start_and_tells_none(
        self, monkeypatch: pytest.MonkeyPatch, value: str | None
    ) -> None:
        monkeypatch.delenv("THE_KEYS", raising=False)
        if value is not None:
            monkeypatch.setenv("THE_KEYS", value)
        with pytest.raises(ConfigurationError, match="THE_KEYS holds no keys") as refused:
            Ingress(None, self.CONFIG)  # type: ignore[arg-type]
        assert '"tell"' not in str(refused.value)

    def test_they_are_keys_where_a_bind_address_asks_for_some(self) -> None:
        assert ApiConfig(keys_env="THE_KEYS").has_keys
        assert not ApiConfig().has_keys


class TestKeysOfAFile:
    def test_they_are_added_to_the_others(self, tmp_path: Path) -> None:
        listed = ApiKey(tenant="listed", sha256="a" * 64)
        file = tmp_path / "api_keys"
        file.write_text(json.dumps([{"tenant": "secret", "sha256": "b" * 64}]))
        config = ApiConfig(keys=(listed,), keys_file=file, tenant_weights={"secret": 2})
        assert [key.tenant for key in config.all_keys()] == ["listed", "secret"]
        assert config.has_keys
        assert ApiConfig.model_validate(config.model_dump(mode="json")) == config

    @pytest.mark.parametrize("content", [None, "", "{}", '[{"tenant": "t", "sha256": "tell"}]'])
    def test_an_ingress_without_a_list_does_not_start_and_tells_none(
        self, tmp_path: Path, content: str | None
    ) -> None:
        file = tmp_path / "api_keys"
        if content is not None:
            file.write_text(content)
        with pytest.raises(ConfigurationError, match=r"api_keys (cannot be read|holds)") as refused:
            Ingress(None, ApiConfig(keys_file=file))  # type: ignore[arg-type]
        assert '"tell"' not in str(refused.value)

    def test_tenants_share_where_nobody_knows_how_many_there_are(self, tmp_path: Path) -> None:
        config = ServeConfig.model_validate(
            {
                "target": {"engine": {"model": "embedded:target", "max_leases": 4}},
                "drafter": "target",
                "api": {"keys_file": str(tmp_path / "api_keys")},
            }
        )
        assert config.filled_api.shared_requests is not None
