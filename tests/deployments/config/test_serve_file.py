"""A configuration file is accepted, or refused in one readable message."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.config.serve_file import check
from rapid.errors import ConfigurationError
from rapid.transfers import OWN_RULES

CONFIG = Path(__file__).parents[3] / "serve_config.yaml"


def test_the_embedded_configuration_passes_the_door() -> None:
    config = check(CONFIG)
    assert config.target.engine.max_context is not None


Change = Callable[[dict[str, Any], dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda _, args: args["target"]["engine"].update(kv_cache_token=5),
            "target.engine.kv_cache_token: unknown key; did you mean kv_cache_tokens?",
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
            "drafter: target takes two leases a request: raise target.engine.max_leases",
        ),
        (
            lambda _, args: (
                args.update(speculation={"transfer": "adaptive"}),
                args["target"]["engine"].update(max_leases=1),
            ),
            "transfer: adaptive takes two leases a request: raise target.engine.max_leases",
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
            lambda _, args: args.update(speculation={"transfer": "mine"}),
            "speculation.transfer: 'mine' is a rule of this process alone",
        ),
        (
            lambda _, args: args["retriever"]["pool"].update(max_replicas=2),
            "a local store lives in one retriever: set retriever.pool.max_replicas to 1",
        ),
        (
            lambda _, args: args["retriever"]["retrieval"].update(
                embedder={"kind": "bge-m3", "device": "cuda"}
            ),
            "device is cuda, and the retriever's pool reserves no GPU: set retriever.pool.num_gpus",
        ),
        (
            lambda _, args: args["retriever"]["pool"].update(num_gpus=0.5),
            "reserves 0.5 GPUs, and the embedder runs on the cpu: set retriever.pool.num_gpus to 0",
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
            lambda _, args: args["api"].update(
                keys=[{"tenant": "acme", "sha256": "0" * 64}], tenant_weights={"acne": 2}
            ),
            "api.tenant_weights names 'acne', which has no key",
        ),
        (
            lambda file, _: file["applications"][0].update(
                deployments=[{"name": "Ingress", "user_config": {"keys": []}}]
            ),
            "deployments: Ingress: user_config is made from args: change the settings there",
        ),
        (
            lambda file, _: file["applications"].append(file["applications"][0] | {"name": "b"}),
            "of 2 applications with import_path: deployments.app:build, one must have",
        ),
        (
            lambda _, args: args["api"].update(canary={"application": "next", "share": 0.1}),
            "api.canary.application: the file has no other application 'next'",
        ),
        (
            lambda file, _: file["http_options"].update(host="0.0.0.0"),
            "http_options.host is 0.0.0.0, which other machines can reach, and api.keys is empty",
        ),
        (
            lambda file, _: file["http_options"].pop("host"),
            "http_options.host is 0.0.0.0, Serve's default, which other machines can reach",
        ),
        (lambda file, _: file.pop("http_options"), "http_options.host is 0.0.0.0, Serve's default"),
        (
            lambda file, _: file.update(http_options=["host: 0.0.0.0"]),
            "http_options: Input should be a valid dictionary",
        ),
        (
            lambda file, _: file["http_options"].update(port="eight"),
            "http_options.port: Input should be a valid integer",
        ),
        (
            lambda file, _: file["http_options"].update(port=80000),
            "http_options.port is 80000: set one from 1 to 65535",
        ),
        (
            lambda file, _: file.update(http_option={"port": 1}),
            "http_option: unknown key; did you mean http_options?",
        ),
        (
            lambda file, _: file.update(proxy_location="everynode"),
            "proxy_location: Input should be 'Disabled', 'HeadOnly' or 'EveryNode'",
        ),
        (
            lambda file, _: file["logging_config"].update(log_level="LOUD"),
            'logging_config.log_level: Got "LOUD" for log_level',
        ),
        (
            lambda file, _: file["applications"][0].update(rout_prefix="/x"),
            "applications.0.rout_prefix: unknown key; did you mean route_prefix?",
        ),
        (
            lambda file, _: file["applications"][0].update(
                deployments=[{"name": "Target", "max_ongoing_request": 5}]
            ),
            "max_ongoing_request: unknown key; did you mean max_ongoing_requests?",
        ),
        (
            lambda file, _: file["applications"][0].update(deployments=[{"name": "target"}]),
            "there is no deployment 'target': give one of Target, Drafter, Retriever",
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
            "rope_type 'dynamic' changes the angles of stored keys",
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
    tmp_path: Path, change: Change, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OWN_RULES, "mine", lambda p, q, eta: p)
    file = copy.deepcopy(yaml.safe_load(CONFIG.read_text()))
    change(file, file["applications"][0]["args"])
    path = tmp_path / "mistaken.yaml"
    path.write_text(yaml.safe_dump(file))
    with pytest.raises(ConfigurationError) as refused:
        check(path)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "Traceback" not in str(refused.value)


def test_serves_own_options_may_stand_in_a_deployments_block(tmp_path: Path) -> None:
    file = yaml.safe_load(CONFIG.read_text())
    file["applications"][0]["deployments"] = [{"name": "Target", "health_check_period_s": 10}]
    path = tmp_path / "large.yaml"
    path.write_text(yaml.safe_dump(file))
    assert check(path).target.engine.max_context == 4096


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    file = yaml.safe_load(CONFIG.read_text())
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
    [
        ("a: [", "is not YAML"),
        ("", "is empty"),
        ("- 1", "is no configuration"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "file.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match=message):
        check(path)
