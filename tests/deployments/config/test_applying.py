"""What is sent to Serve for an edited file, against what runs."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.config.applying import update
from deployments.config.serve_file import check_applications
from rapid.embedded import TARGET
from rapid.errors import ConfigurationError
from tests.deployments.config.swapped import swap_tokens

FILE: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parents[3] / "serve_config.yaml").read_text(encoding="utf-8")
)
RUNNING = FILE["applications"][0]


@pytest.fixture
def file() -> dict[str, Any]:
    return copy.deepcopy(FILE)


def sent(file: dict[str, Any], running: dict[str, Any] | None = RUNNING) -> tuple[Any, Any]:
    """The application that is sent, and its effects."""
    content, effects = update(file, check_applications(file), {"rapid": running} if running else {})
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
    content, _ = update(file, check_applications(file), {"rapid": RUNNING})
    assert content["applications"][0] == other
    assert content["http_options"] == FILE["http_options"]


def test_two_versions_are_two_applications_of_one_file(file: Any) -> None:
    (ours,) = file["applications"]
    following = copy.deepcopy(ours) | {"name": "next", "route_prefix": "/next"}
    file["applications"].append(following)
    ours["args"]["api"]["canary"] = {"application": "next", "share": 0.1}
    content, effects = update(file, check_applications(file), {"rapid": RUNNING})
    front, beside = content["applications"]
    assert blocks(front)["Ingress"]["user_config"]["canary"]["share"] == 0.1
    assert beside == following
    assert effects.pop("rapid/Ingress") == "live"
    assert set(effects.values()) == {"starts"}
    assert all(name.startswith("next/") for name in effects)


def test_models_that_share_no_tokens_do_not_replace_each_other(file: Any, tmp_path: Path) -> None:
    """While replicas are replaced, one's answers would be read as the other's."""
    swapped = swap_tokens(tmp_path)
    for role in ("target", "drafter"):
        file["applications"][0]["args"][role]["engine"]["model"] = str(swapped)
    with pytest.raises(ConfigurationError, match=r"do not share their tokens: run the new model"):
        sent(file)
    shutil.copy(TARGET / "tokenizer.json", swapped)
    _, effects = sent(file)
    assert effects["Target"] == "rolls"
