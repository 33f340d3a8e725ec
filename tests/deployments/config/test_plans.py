"""What an edit of each setting does: as the operator's page says it, and as Serve decides it."""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.serve.config
from pydantic import BaseModel
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.version import DeploymentVersion

from deployments.app import compose
from deployments.config.api_config import ApiKey, CanaryConfig
from deployments.config.plans import deployment_plans, effects
from deployments.config.serve_config import ServeConfig
from retrieval.settings import LexicalEmbedderConfig, LocalStoreConfig
from tests.deployments.test_app import graph

PAGE = Path(__file__).parents[3] / "docs" / "operations.md"
POOL = {"num_gpus": 1, "max_replicas": 2}
STORE = {"kind": "server", "url": "https://qdrant:6333"}
EMBEDDER = {"kind": "bge-m3"}
LIBRARY = {"database": "postgresql://db/rapid", "blobs": "s3://files"}
CONFIG = ServeConfig.model_validate(
    {
        "target": {"engine": {"model": "/models/target"}, "pool": POOL},
        "drafter": {"engine": {"model": "/models/drafter"}, "pool": POOL},
        "retriever": {"retrieval": {"store": STORE, "embedder": EMBEDDER}, "pool": POOL},
        "orchestrator": {"pool": POOL},
        "library": {"pool": POOL, **LIBRARY},
        "api": {"pool": POOL},
    }
)
OTHERS = {
    "keys_file": Path("keys.json"),
    "folder": Path("/elsewhere"),
    "node_labels": {"rapid-pool": "other"},
    "quantization": "int8",
    "embedder": LexicalEmbedderConfig(),
    "store": LocalStoreConfig(),
    "canary": CanaryConfig(application="next", share=0.1),
    "keys": (ApiKey(tenant="a", sha256="0" * 64),),
    "passage_cache_bits": 8,
    "tenant_weights": {"a": 2},
    "allowed_origins": ("https://app.example",),
}
DEPLOYMENTS = {
    "target": "Target",
    "drafter": "Drafter",
    "retriever": "Retriever",
    "orchestrator": "Orchestrator",
    "library": "Librarian",
    "api": "Ingress",
}


@pytest.fixture(autouse=True, scope="module")
def routers_are_pickled_once() -> Iterator[None]:
    """Serve pickles the same request routers for each deployment: four fifths of the time here."""
    pickling = SimpleNamespace(**vars(ray.serve.config.cloudpickle))
    pickling.dumps = functools.cache(pickling.dumps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray.serve.config, "cloudpickle", pickling)
        yield


def rows() -> dict[str, str]:
    """The table's settings, with what it says about an edit of them."""
    found = {}
    for settings, effect in re.findall(r"^\| (.*?) \| (.*) \|$", section(), flags=re.MULTILINE):
        found |= dict.fromkeys(re.findall(r"`([^`]+)`", settings), effect)
    del found["args"]  # where the settings are
    return found


def section() -> str:
    return PAGE.read_text().split("## Change a running server")[1].split("\n## ")[0]


def said(setting: str) -> tuple[str, str]:
    """The row of a setting, the most specific that fits, and what it says."""
    fitting = [each for each in rows() if fnmatchcase(setting, each)]
    assert fitting, f"the table in {PAGE.name} does not say what an edit of {setting} does"
    row = max(fitting, key=lambda each: (each.count("*") == 0, len(each)))
    return row, rows()[row]


def leaves(settings: BaseModel, prefix: str = "") -> Iterator[str]:
    """The dotted names of all settings; a union's as of the value it has."""
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, BaseModel) and type(value).model_fields.keys() != {"kind"}:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


SETTINGS = [
    each
    for each in leaves(CONFIG)
    if each != "api.models"  # which follows from the others
    if each != "library.pool.first_token_goal_s"  # of engines
    if not each.endswith(("engine_cpus", "nodes")) or each.startswith(("target", "drafter"))
]


def edited(settings: Any, path: str) -> Any:
    """The settings with another value at `path`, which need not be a valid one."""
    name, _, rest = path.partition(".")
    value = getattr(settings, name)
    field = type(settings).model_fields[name]
    if name in OTHERS:
        new = OTHERS[name]
    else:
        new = edited(value, rest) if rest else another(value, field.annotation)
    return settings.model_copy(update={name: new})


def another(value: Any, annotation: Any) -> Any:
    """Another value of a setting's type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str) and typing.get_origin(annotation) is typing.Literal:
        return next(each for each in typing.get_args(annotation) if each != value)
    if isinstance(value, str):
        return f"{value}-2"
    assert value is None, f"OTHERS needs another value than {value!r}"
    (kind,) = (each for each in typing.get_args(annotation) if each is not type(None))
    return {"type": "linear"} if typing.get_origin(kind) is dict else kind(2)


def restarted(old: ServeConfig, new: ServeConfig) -> set[str]:
    """The deployments of both whose replicas Serve would replace."""
    before = versions_of_config() if old is CONFIG else serves_versions(old)
    after = serves_versions(new)
    return {
        name for name in before.keys() & after if before[name].requires_actor_restart(after[name])
    }


def serves_versions(config: ServeConfig) -> dict[str, DeploymentVersion]:
    """The versions that Serve's controller compares."""
    versions = {}
    for name, node in graph(compose(config)).items():
        deployment = node._bound_deployment
        deployment._deployment_config.version = "the application's"  # as Serve does
        config_sent = deployment._deployment_config.to_proto_bytes()
        received = DeploymentConfig.from_proto_bytes(config_sent)
        replicas = deployment._replica_config
        versions[name] = DeploymentVersion(
            received.version,
            received,
            replicas.ray_actor_options,
            replicas.placement_group_bundles,
            replicas.placement_group_strategy,
        )
    return versions


@functools.cache
def plans_of_config() -> Any:
    return deployment_plans(CONFIG)


@functools.cache
def versions_of_config() -> dict[str, DeploymentVersion]:
    return serves_versions(CONFIG)


@pytest.mark.parametrize("setting", SETTINGS)
def test_an_edit_does_what_the_table_says(setting: str) -> None:
    new = edited(CONFIG, setting)
    _, effect = said(setting)
    if effect == "live":
        rolled = set()
    elif effect == "rolls its own deployment":
        rolled = {DEPLOYMENTS[setting.partition(".")[0]]}
    else:
        rolled = set(effect.removeprefix("rolls ").split(", "))
    done = effects(plans_of_config(), deployment_plans(new))
    assert {name for name, each in done.items() if each == "rolls"} == rolled
    assert done, f"an edit of {setting} reaches no deployment"
    assert restarted(CONFIG, new) == rolled


def test_every_row_is_about_a_setting() -> None:
    matched = {said(setting)[0] for setting in SETTINGS}
    outside = {name for name, effect in rows().items() if effect == "restart"}
    assert outside == {"http_options", "proxy_location"}
    assert rows().keys() - outside - {"drafter", "target", "prompt_lookup"} == matched


@pytest.mark.parametrize(
    ("drafter", "done"),
    [
        ("target", {"Drafter": "ends"}),
        ("prompt_lookup", {"Drafter": "ends", "Retriever": "ends", "Librarian": "rolls"}),
    ],
)
def test_another_kind_of_drafter(drafter: str, done: dict[str, str]) -> None:
    assert rows()[drafter] == (
        "rolls Orchestrator, starts or ends Drafter and Retriever, whose end rolls Librarian"
    )
    done = done | {"Orchestrator": "rolls"}
    new = CONFIG.model_copy(update={"drafter": drafter})
    assert effects(plans_of_config(), deployment_plans(new)) == done
    assert restarted(CONFIG, new) == {name for name, each in done.items() if each == "rolls"}


def test_a_model_that_is_not_embedded_any_more() -> None:
    """The ingress says in the model's card that an embedded one understands little."""
    target = CONFIG.target
    engine = target.engine.model_copy(update={"model": "embedded:target"})
    embedded = CONFIG.model_copy(update={"target": target.model_copy(update={"engine": engine})})
    assert effects(deployment_plans(embedded), plans_of_config())["Ingress"] == "live"


def test_an_unchanged_application_changes_nothing() -> None:
    again = ServeConfig.model_validate(CONFIG.model_dump(exclude_unset=True))
    assert effects(plans_of_config(), deployment_plans(again)) == {}
    assert restarted(CONFIG, again) == set()


def test_a_stores_key_is_in_the_retrievers_version_but_in_no_other_deployment() -> None:
    def plans(key: str) -> Any:
        retriever = {"retrieval": {"store": STORE | {"api_key": key}}}
        plain = CONFIG.model_dump(exclude_unset=True) | {"retriever": retriever}
        return deployment_plans(ServeConfig.model_validate(plain))

    assert effects(plans("a-key"), plans("other")) == {"Retriever": "rolls"}
    assert "a-key" not in repr(plans("a-key"))
