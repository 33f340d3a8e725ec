"""The container and the cluster file of `deploy/`, as far as they can be read without building."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path

import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from deployments.api.proxy.ready_in_time import DEADLINE_S
from deployments.cli.server_process import LOCAL_RAY
from deployments.config.manifests import manifests

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
