"""The container and the cluster file of `deploy/`, as far as they can be read without building."""

from __future__ import annotations

import fnmatch
import json
import re
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from deploy import watching
from deployments import metrics
from deployments.api.http.access_log import CAUSES
from deployments.cli.server.server_process import LOCAL_RAY
from deployments.config.kubernetes.ray_service import manifests
from deployments.proxy.ready_in_time import DEADLINE_S
from rapid.receipt import Failover
from tests.deployments.test_metrics import Instrument

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text().replace("\\\n", " ")
INSTRUCTIONS = re.findall(r"^([A-Z]+) +(.*)$", DOCKERFILE, re.MULTILINE)


def arguments(instruction: str) -> list[str]:
    return [rest for name, rest in INSTRUCTIONS if name == instruction]


def test_the_image_runs_as_the_user_of_the_manifests() -> None:
    user = arguments("USER")[-1]
    assert f"--uid {user} " in DOCKERFILE
    made = manifests(ROOT / "serve_config.yaml", "any")["rayservice.yaml"]
    assert f"runAsUser: {user}\n" in made
    assert int(user) > 0


def test_what_is_installed_are_the_tested_versions() -> None:
    installs = [line for line in arguments("RUN") if "-r requirements.txt" in line]
    assert len(installs) == 1
    assert "pip install -c constraints.txt" in installs[0]
    assert "--extra-index-url" not in DOCKERFILE  # of two indexes either could give any package
    others = [line for line in installs[0].split("&&") if "${TORCH_INDEX}" in line]
    assert [line.split()[-1] for line in others] == ["torch"]
    assert all("--no-deps" in line for line in others)
    assert all("PIP_CONSTRAINT=" in line for line in arguments("RUN") if "pip wheel" in line)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {
        name.split(".")[0] for name in settings["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    copied = {line.split()[0] for line in arguments("COPY") if not line.startswith("--from")}
    assert packages <= copied


def test_only_named_files_reach_the_build() -> None:
    everything, *rules = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and line[0] != "#"
    ]
    allowed = {rule[1:] for rule in rules if rule[0] == "!"}
    assert everything == "*"
    for line in arguments("COPY"):
        if not line.startswith("--from"):
            assert set(line.split()[:-1]) <= allowed
    assert not any(fnmatch.fnmatch(name, "*env*") or name == "." for name in allowed)
    assert all((ROOT / name).exists() for name in allowed)


def test_the_container_is_healthy_while_requests_would_be_answered() -> None:
    (health,) = arguments("HEALTHCHECK")
    assert "http://127.0.0.1:8000/ready" in health
    patience_s = int(re.findall(r"wget .*--timeout=(\d+)", health)[0])
    assert DEADLINE_S < patience_s < int(re.findall(r"--timeout=(\d+)s", health)[0])
    assert "wget" in dict(part.split("=", 1) for part in arguments("ARG"))["SYSTEM_PACKAGES"]


def test_serve_s_proxies_are_started_as_by_rapid_serve() -> None:
    ours = {f"{name}={value}" for name, value in LOCAL_RAY.items() if name.startswith("RAY_SERVE_")}
    assert ours <= set(" ".join(arguments("ENV")).split())


def test_no_secret_is_in_the_image() -> None:
    assert not re.search(r"(?i)token|password|secret_|api_key", " ".join(arguments("ENV")))
    assert not re.search(r"(?i)token|password|secret", " ".join(arguments("ARG")))


def test_the_cluster_file_is_of_ray_s_schema() -> None:
    settings = yaml.safe_load((ROOT / "deploy/ray-up.yaml").read_text())
    validate_config(prepare_config(settings))
    options = settings["docker"]["run_options"]
    assert "--env=RAY_AUTH_MODE=token" in options
    for command in (*settings["head_start_ray_commands"], *settings["worker_start_ray_commands"]):
        assert command.startswith("ray st")


class TestAlerts:
    RULES: ClassVar[list[dict[str, Any]]] = [
        rule
        for group in yaml.safe_load((ROOT / "deploy/alerts.yaml").read_text())["groups"]
        for rule in group["rules"]
    ]

    def test_they_are_about_metrics_that_there_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made: dict[str, Any] = {}

        class Named(Instrument):
            def __init__(self, name: str, what: str, *rest: Any) -> None:
                super().__init__(name, what, *rest)
                made[f"ray_{name}"] = self

        for kind in ("Counter", "Gauge", "Histogram"):
            monkeypatch.setattr(metrics, kind, Named)
        monkeypatch.setattr(Instrument, "read", defaultdict(int))
        metrics.RequestMetrics("m")
        metrics.IngressMetrics("m")
        metrics.EngineMetrics("m", "target")
        metrics.RetrieverMetrics("m")
        assert {rule["alert"] for rule in self.RULES} >= {"RapidNotReady", "RapidRefusals"}
        for rule in self.RULES:
            names = re.findall(r"ray_[a-z_]+", rule["expr"])
            assert names
            for name in names:
                instrument = made[name.removesuffix("_bucket")]
                labels = {*instrument.labels, "le"}
                asked = re.findall(r"(\w+)=~?\"", rule["expr"])
                assert set(asked) <= labels

    def test_they_name_causes_and_losses_that_there_are(self) -> None:
        known = {*CAUSES, *get_args(Failover), "refused", "failed"}
        for rule in self.RULES:
            for values in re.findall(r"\w+=~?\"([^\"]+)\"", rule["expr"]):
                assert set(values.split("|")) <= known

    def test_they_point_at_pages_that_there_are(self) -> None:
        page = (ROOT / "docs/operations.md").read_text().replace('"', "`")
        for rule in self.RULES:
            file, _, words = rule["annotations"]["runbook"].partition(": ")
            assert file == "docs/operations.md"
            assert words in page


class TestDashboard:
    def test_the_file_is_what_the_definitions_make(self) -> None:
        assert json.loads(watching.DASHBOARD.read_text()) == watching.make_dashboard()

    def test_every_panel_shows_something_that_the_metrics_have(self) -> None:
        made = watching.make_dashboard()
        assert len({panel["title"] for panel in made["panels"]}) == len(made["panels"])
        places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in made["panels"]}
        assert len(places) == len(made["panels"])
        for panel in made["panels"]:
            for target in panel["targets"]:
                assert re.search(r"\bray_(vllm|rapid)_\w+", target["expr"])
                for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                    assert label in re.findall(r"by \(([^)]*)\)", target["expr"])[0]

    @pytest.mark.parametrize(
        ("query", "unknown"),
        [
            ("sum by (pool) (ray_vllm_kv_cache_usage_perc)", []),
            ("sum by (tenant) (ray_vllm_kv_cache_usage_perc)", ["tenant"]),
            ('rate(ray_rapid_mode_total{mode="fused", pool!="x"}[5m])', ["pool"]),
            ("rate(ray_rapid_modes_total[5m])", ["ray_rapid_modes_total"]),
            ("ray_rapid_draft_seconds", ["ray_rapid_draft_seconds"]),  # has parts only
            ("sum by (le) (rate(ray_rapid_draft_seconds_bucket[5m]))", []),
        ],
    )
    def test_what_no_metric_has_is_found(self, query: str, unknown: list[str]) -> None:
        assert watching.find_unknown(query) == unknown
