"""What is sent to Serve for an edited file, against what runs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.config.applying import update
from deployments.config.preflight import preflight
from deployments.config.serve_config import ServeConfig

FILE: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parents[3] / "serve_config.yaml").read_text(encoding="utf-8")
)
RUNNING = FILE["applications"][0]


@pytest.fixture
def file() -> dict[str, Any]:
    return copy.deepcopy(FILE)


def sent(file: dict[str, Any], running: dict[str, Any] | None = RUNNING) -> tuple[Any, Any]:
    """The application that is sent, and its effects."""
    (ours,) = (each for each in file["applications"] if each["name"] == "rapid")
    config = preflight(ServeConfig.model_validate(ours["args"]))
    content, effects = update(file, config, running)
    (application,) = (each for each in content["applications"] if each["name"] == "rapid")
    return application, effects


def blocks(application: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each for each in application["deployments"]}


def test_live_settings_go_past_the_builder(file: Any) -> None:
    args = file["applications"][0]["args"]
    args["api"]["max_choices"] = 3
    application, effects = sent(file)
    assert application["args"] == RUNNING["args"]
    assert blocks(application)["Ingress"]["user_config"]["max_choices"] == 3
    assert blocks(application).keys() == {"Ingress", "Orchestrator"}
    assert effects == {"Ingress": "live"}


def test_the_next_edit_is_compared_with_what_was_sent_last(file: Any) -> None:
    args = file["applications"][0]["args"]
    args["api"]["max_choices"] = 3
    running, _ = sent(file)
    assert sent(file, running) == (running, {})
    args["speculation"]["max_draft"] = 4
    application, effects = sent(file, running)
    assert effects == {"Orchestrator": "live"}
    assert application["args"] == RUNNING["args"]
    assert blocks(application)["Ingress"]["user_config"]["max_choices"] == 3


def test_scaling_and_engines_go_through_the_builder_with_all_that_is_in_the_file(file: Any) -> None:
    args = file["applications"][0]["args"]
    args["api"]["max_choices"] = 3
    running, _ = sent(file)
    args["drafter"]["pool"]["max_replicas"] = 5
    args["target"]["engine"]["step_tokens"] = 64
    application, effects = sent(file, running)
    assert application == file["applications"][0]
    assert effects == {"Drafter": "live", "Target": "rolls", "Orchestrator": "live"}


def test_an_application_that_does_not_run_starts(file: Any) -> None:
    application, effects = sent(file, None)
    assert application == file["applications"][0]
    assert set(effects.values()) == {"starts"}


def test_what_else_the_file_says_is_sent_as_it_is(file: Any) -> None:
    other = {"name": "other", "import_path": "other:app", "route_prefix": "/other"}
    file["applications"].insert(0, other)
    ours = file["applications"][1]
    ours["deployments"] = [{"name": "Ingress", "max_queued_requests": 7}]
    ours["args"]["api"]["max_choices"] = 3
    application, _ = sent(file)
    block = blocks(application)["Ingress"]
    assert (block["max_queued_requests"], block["user_config"]["max_choices"]) == (7, 3)
    config = preflight(ServeConfig.model_validate(ours["args"]))
    content, _ = update(file, config, RUNNING)
    assert content["applications"][0] == other
    assert content["http_options"] == FILE["http_options"]
