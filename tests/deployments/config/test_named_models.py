"""An application with several models: its settings, its deployments and what an edit does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.app import compose
from deployments.config.applying import update
from deployments.config.kubernetes.pods import POOL_LABEL
from deployments.config.kubernetes.ray_service import manifests
from deployments.config.named_models import read_application
from deployments.config.plans import deployment_plans, effects
from deployments.config.preflight import preflight
from deployments.config.serve_file import check, check_applications
from rapid.errors import ConfigurationError
from tests.deployments.config.swapped import swap_tokens
from tests.deployments.test_app import graph

PAGE = Path(__file__).parents[3] / "docs" / "operations.md"
ENGINE = {"max_context": 1024, "kv_cache_tokens": 4096, "max_leases": 4, "threads": 1}
TARGET = {"engine": {"model": "embedded:target", **ENGINE}}
DRAFTER = {"engine": {"model": "embedded:drafter", **ENGINE}}
GPU = {"pool": {"num_gpus": 1}}
ARGS: dict[str, Any] = {
    "engine_pools": {"quick": DRAFTER},
    "models": {
        "small": {"target": DRAFTER, "drafter": "quick"},
        "large": {
            "target": TARGET,
            "drafter": "quick",
            "speculation": {"transfer": "boost"},
            "default_temperature": 0.5,
        },
    },
    "retriever": {"retrieval": {"chunk_tokens": 32, "budget_tokens": 128}},
}

Change = Callable[[dict[str, Any]], object]


def changed(change: Change) -> dict[str, Any]:
    args: dict[str, Any] = json.loads(json.dumps(ARGS))  # in which no two parts are one object
    change(args)
    return args


def file_of(args: dict[str, Any], **more: Any) -> dict[str, Any]:
    application = {"name": "rapid", "import_path": "deployments.app:build", "args": args}
    return {"http_options": {"host": "127.0.0.1"}, "applications": [application | more]}


def test_each_model_has_an_orchestrator_and_they_share_what_they_name() -> None:
    config = preflight(read_application(ARGS))
    nodes = graph(compose(config))
    assert nodes.keys() == {
        *("Ingress", "Orchestrator-small", "Orchestrator-large", "Target-small", "Target-large"),
        *("Engines-quick", "Retriever"),
    }
    for name in ("small", "large"):
        settings, *handles = nodes[f"Orchestrator-{name}"]._bound_deployment.init_args
        assert settings.api.model == name
        of = [nodes[part] for part in (f"Target-{name}", "Engines-quick", "Retriever")]
        assert all(given is each for given, each in zip(handles, [*of, None], strict=True))
    labels = {name: node._bound_deployment.init_args[-1] for name, node in nodes.items()}
    assert (labels["Engines-quick"], labels["Target-small"]) == ("quick", "small")
    assert labels["Retriever"] == ""
    settings, _, _, *orchestrators = nodes["Ingress"]._bound_deployment.init_args
    assert [*settings.cards] == ["small", "large"]
    names = [each._bound_deployment.name for each in orchestrators]
    assert names == ["Orchestrator-small", "Orchestrator-large"]


def test_what_is_beside_the_models_holds_for_those_that_say_nothing_else() -> None:
    small, large = (model.config for model in preflight(read_application(ARGS)).served)
    assert (small.speculation.transfer, large.speculation.transfer) == ("adaptive", "boost")
    assert small.retriever == large.retriever
    temperatures = [model.card.default_temperature for model in read_application(ARGS).served]
    assert temperatures == [None, 0.5]  # before the checkpoints are read
    alone = changed(lambda args: args["models"]["large"].update(retriever={}))
    parts = read_application(alone).parts
    assert parts["retriever-large"].key == "models.large.retriever"
    assert parts["retriever"].settings.retrieval.budget_tokens == 128


def test_the_example_of_the_operators_page_is_valid() -> None:
    section = PAGE.read_text().split("## Several models")[1]
    example = yaml.safe_load(section.split("```yaml\n")[1].split("```")[0])
    small, large = preflight(read_application(example["args"])).served
    assert small.drafter == large.drafter
    assert large.config.speculation.eta == 5


def test_a_pool_may_be_one_models_target_and_anothers_drafter() -> None:
    args = changed(lambda args: args["models"]["small"].update(target="quick", drafter="target"))
    parts = read_application(args).engine_parts
    assert parts.keys() == {"engines-quick", "target-large"}


def test_models_need_no_model_that_drafts() -> None:
    args = changed(lambda args: args["models"]["small"].update(drafter="prompt_lookup"))
    small, _ = preflight(read_application(args)).served
    assert (small.drafter, small.retriever) == (None, None)


def test_the_limits_are_those_of_all_targets_together() -> None:
    keys = [{"tenant": each, "sha256": each * 64} for each in "ab"]
    api = read_application(ARGS | {"api": {"keys": keys}}).filled_api
    # A target's four leases are two answers of `adaptive` or four of `boost`, and never below four.
    assert api.max_requests_per_tenant == 2 * (4 + 4)
    assert api.shared_requests == 4 + 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda args: args.update(target=TARGET), "target belongs to one model: write it under"),
        (lambda args: args.update(api={"model": "m"}), "api.model names the only model: leave it"),
        (lambda args: args.update(api={"models": {"m": {}}}), "api.models follows from the other"),
        (lambda args: args.update(models={}), "models: Dictionary should have at least 1 item"),
        (
            lambda args: args["models"].update({"Big/one": args["models"]["large"]}),
            "'Big/one' cannot name deployments: take at most 40 lower-case letters",
        ),
        (
            lambda args: args["engine_pools"].update(target=DRAFTER),
            "'target' cannot name deployments",
        ),
        (
            lambda args: args["models"]["large"].update(drafter="fast"),
            "models.large: there is no pool 'fast': engine_pools has quick",
        ),
        (
            lambda args: args["engine_pools"].update(spare=DRAFTER),
            "engine_pools.spare: no model names it: leave it out",
        ),
        (
            lambda args: (
                [each.update(drafter="prompt_lookup") for each in args["models"].values()]
                and args.pop("engine_pools")
            ),
            "retriever: no model uses it: leave it out",
        ),
        (
            lambda args: args["models"]["small"].update(target="quick"),
            "models.small: target and drafter are one pool: write drafter: target",
        ),
        (
            lambda args: args["models"]["small"].update(speculation={"transfer": "adaptiv"}),
            "models.small.speculation.transfer: must be 'distill', 'boost'",
        ),
        (
            lambda args: args["models"]["small"].update(drafters="quick"),
            "models.small.drafters: unknown key; did you mean drafter?",
        ),
        (
            lambda args: args["models"]["small"]["target"]["engine"].update(deterministic=True),
            "models.small: deterministic is set on one of target and drafter",
        ),
        (
            lambda args: args["models"]["large"].update(drafter="prompt_lookup", retriever={}),
            "models.large: drafter: prompt_lookup retrieves nothing: leave retriever out",
        ),
        (
            lambda args: args["models"]["large"]["target"]["engine"].update(model="/nowhere"),
            "models.large.target.engine: model '/nowhere': there is no such checkpoint",
        ),
        (
            lambda args: args["engine_pools"]["quick"]["engine"].update(model="/nowhere"),
            "engine_pools.quick.engine: model '/nowhere': there is no such checkpoint",
        ),
    ],
)
def test_what_is_refused_says_what_to_change(change: Change, message: str) -> None:
    args = changed(change)
    with pytest.raises(ConfigurationError) as refused:
        preflight(read_application(args))
    assert message in str(refused.value)


def test_a_name_written_twice_is_refused(tmp_path: Path) -> None:
    """YAML would take the last without a word."""
    path = tmp_path / "serve.yaml"
    text = yaml.safe_dump(file_of(ARGS))
    path.write_text(text.replace("      large:\n", "      small:\n"))
    with pytest.raises(ConfigurationError, match=r"'small' is written twice .* line \d+"):
        check(path)


class TestVocabularies:
    @pytest.fixture
    def other(self, tmp_path: Path) -> dict[str, Any]:
        """A target whose tokens are not those of the embedded models."""
        return {"engine": {"model": str(swap_tokens(tmp_path)), **ENGINE}}

    def test_a_shared_drafter_has_that_of_every_target(self, other: dict[str, Any]) -> None:
        args = changed(lambda args: args["models"]["large"].update(target=other))
        with pytest.raises(ConfigurationError) as refused:
            preflight(read_application(args))
        assert str(refused.value).startswith(
            "models.large: target and drafter have different vocabularies"
        )

    def test_models_of_two_have_a_retriever_each(self, other: dict[str, Any]) -> None:
        alone = {"target": other, "drafter": "target"}
        args = changed(lambda args: args["models"].update(large=alone))
        with pytest.raises(ConfigurationError, match=r"models.large: .* a retriever of its own"):
            preflight(read_application(args))
        args["models"]["large"]["retriever"] = ARGS["retriever"]
        assert preflight(read_application(args))


class TestEdits:
    def done(self, change: Change) -> dict[str, str]:
        before, after = (read_application(args) for args in (ARGS, changed(change)))
        return dict(effects(deployment_plans(before), deployment_plans(after)))

    def test_a_shared_engine_is_replaced_alone(self) -> None:
        def edit(args: dict[str, Any]) -> None:
            args["engine_pools"]["quick"]["engine"]["step_tokens"] = 64

        orchestrators = dict.fromkeys(("Orchestrator-small", "Orchestrator-large"), "live")
        assert self.done(edit) == {"Engines-quick": "rolls"} | orchestrators

    def test_a_models_method_is_live(self) -> None:
        def edit(args: dict[str, Any]) -> None:
            args["models"]["large"]["speculation"]["max_draft"] = 3

        assert self.done(edit) == {"Orchestrator-large": "live"}

    def test_a_model_more_starts_and_the_ingress_gets_its_handle(self) -> None:
        def edit(args: dict[str, Any]) -> None:
            args["models"]["third"] = {"target": "quick", "drafter": "target"}

        assert self.done(edit) == {"Orchestrator-third": "starts", "Ingress": "rolls"}

    def test_apply_sends_live_settings_past_the_builder(self) -> None:
        file = file_of(ARGS)
        running = file["applications"][0]
        edited = file_of(changed(lambda args: args.update(speculation={"max_draft": 3})))
        content, done = update(edited, check_applications(edited), {"rapid": running})
        assert done == {"Orchestrator-small": "live"}  # the other has settings of its own
        assert content["applications"][0]["args"] == ARGS

    def test_apply_refuses_another_vocabulary_under_the_same_name(self, tmp_path: Path) -> None:
        lone = {"target": TARGET, "drafter": "target"}
        before = file_of(changed(lambda args: args["models"].update(large=lone)))
        swapped = {"engine": {"model": str(swap_tokens(tmp_path)), **ENGINE}}
        other = {"target": swapped, "drafter": "target", "retriever": {}}
        after = file_of(changed(lambda args: args["models"].update(large=other)))
        says = r"^models.large.target.engine.model: .* do not share"
        with pytest.raises(ConfigurationError, match=says):
            update(after, check_applications(after), {"rapid": before["applications"][0]})


def test_a_canary_has_the_same_models() -> None:
    api = {"canary": {"application": "next", "share": 0.1}}
    file = file_of(ARGS | {"api": api})
    beside = file_of(ARGS, name="next", route_prefix="/next")["applications"]
    file["applications"] += beside
    assert check_applications(file).keys() == {"rapid", "next"}
    beside[0]["args"] = changed(lambda args: args["models"].pop("small"))
    with pytest.raises(ConfigurationError, match="'next' must have the same models"):
        check_applications(file)


def test_manifests_have_a_group_of_nodes_for_every_pool_with_gpus(tmp_path: Path) -> None:
    def place(args: dict[str, Any]) -> None:
        args["engine_pools"]["quick"] |= GPU
        tiers = {"host_cache_tokens": 4096, "disk_cache_folder": "/kv", "disk_cache_gib": 1}
        target = GPU | {"engine": TARGET["engine"] | tiers}
        for model in args["models"].values():
            model["target"] = target  # which the file writes once, with an anchor

    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(file_of(changed(place))))
    service = yaml.safe_load(manifests(path, "several")["rayservice.yaml"])
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    pods = {each["groupName"]: each["template"]["spec"]["containers"][0] for each in groups}
    assert pods.keys() == {"target-small", "engines-quick", "target-large", "cpu"}
    mounts = {each["name"]: each["mountPath"] for each in pods["target-large"]["volumeMounts"]}
    assert mounts["target-large-kv"] == "/kv"
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    labels = {
        name: part.settings.pool.node_labels[POOL_LABEL]
        for name, part in read_application(application["args"]).parts.items()
    }
    with_gpus = ("target-small", "target-large", "engines-quick")
    cpu = ("retriever", "orchestrator-small", "orchestrator-large", "ingress")
    assert labels == {name: name for name in with_gpus} | dict.fromkeys(cpu, "cpu")
