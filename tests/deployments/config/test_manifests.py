"""The manifests of a configuration: what Kubernetes, Serve and Ray's autoscaler make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _generate_available_node_types_from_ray_cr_spec,
)
from ray.serve.schema import ServeDeploySchema

from deployments.app import compose
from deployments.config.manifests import POOL_LABEL, SECRETS, NodeGroup, manifests, node_groups
from deployments.config.serve_config import ServeConfig
from deployments.config.serve_file import check
from rapid.errors import ConfigurationError
from tests.deployments.test_app import graph

ROOT = Path(__file__).parents[3]
KUBERAY = ROOT / "deploy" / "kuberay"
SCHEMAS = yaml.safe_load(Path(__file__).with_name("kuberay.yaml").read_text())
SHIPPED = {
    "one-node": "serve_config.yaml",
    "one-gpu": "cluster/configs/one-gpu-self-speculation.yaml",
    "llama-8b-with-70b": "cluster/configs/llama-3.1-8b-with-70b-drafter.yaml",
}
MODEL = {"model": "embedded:target", "max_leases": 4}


def schema_errors(document: dict[str, Any]) -> list[str]:
    schema = SCHEMAS[document["kind"]] | {"$defs": SCHEMAS["$defs"]}
    found = jsonschema.Draft202012Validator(schema).iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in found]


def service(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((KUBERAY / name / "rayservice.yaml").read_text())
    return document


def serve_config(name: str) -> tuple[dict[str, Any], ServeConfig]:
    settings = yaml.safe_load(service(name)["spec"]["serveConfigV2"])
    return settings, ServeConfig.model_validate(settings["applications"][0]["args"])


def pods(name: str) -> list[dict[str, Any]]:
    cluster = service(name)["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


@pytest.mark.parametrize("name", SHIPPED)
class TestShipped:
    def test_the_files_are_what_the_configuration_gives(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(ROOT)
        made = manifests(Path(SHIPPED[name]), name)
        kept = {path.name: path.read_text() for path in (KUBERAY / name).iterdir()}
        assert kept == made, "make them again: make manifests"
        assert f"rapid manifests {SHIPPED[name]} {name}\n" in (ROOT / "Makefile").read_text()

    def test_the_service_is_of_the_resource_s_schema(self, name: str) -> None:
        assert schema_errors(service(name)) == []

    def test_serve_and_this_project_take_the_configuration_in_it(self, name: str) -> None:
        settings, config = serve_config(name)
        ServeDeploySchema.model_validate(settings)
        assert config.api.keys_env == "RAPID_API_KEYS"
        assert settings["proxy_location"] == "EveryNode"
        assert settings["http_options"] == {"host": "0.0.0.0", "port": 8000}

    def test_only_what_kubernetes_asks_for_differs_from_the_file(self, name: str) -> None:
        (application,) = yaml.safe_load((ROOT / SHIPPED[name]).read_text())["applications"]
        settings, _ = serve_config(name)
        (ours,) = settings["applications"]
        del ours["args"]["api"]["keys_env"]
        for section in ours["args"].values():
            if isinstance(section, dict) and "pool" in section:
                section["pool"].pop("node_labels", None)
                if not section["pool"]:
                    del section["pool"]
        assert ours == application

    def test_every_replica_finds_a_kind_of_node_that_holds_it(self, name: str) -> None:
        """By Ray's own reading of the manifest, with which its autoscaler chooses nodes."""
        _, config = serve_config(name)
        spec = {"metadata": {}, "spec": service(name)["spec"]["rayClusterConfig"]}["spec"]
        nodes = _generate_available_node_types_from_ray_cr_spec(spec)
        for deployment in graph(compose(config)).values():
            replica = deployment._bound_deployment._replica_config
            (labels,) = replica.placement_group_bundle_label_selector or [
                replica.ray_actor_options.get("label_selector", {})
            ]
            (bundle,) = replica.placement_group_bundles or [
                {"CPU": replica.ray_actor_options["num_cpus"]}
            ]
            fitting = [
                kind
                for kind, node in nodes.items()
                if labels.items() <= node["labels"].items()
                and all(node["resources"].get(what, 0) >= much for what, much in bundle.items())
            ]
            assert len(fitting) == 1, (deployment._bound_deployment.name, bundle, labels, fitting)

    def test_nothing_runs_as_root_and_no_secret_is_written_down(self, name: str) -> None:
        for pod in pods(name):
            (container,) = pod["containers"]
            assert pod["securityContext"]["runAsNonRoot"]
            assert pod["securityContext"]["runAsUser"] > 0
            assert not container["securityContext"]["allowPrivilegeEscalation"]
            secret = {
                each["name"]: each["valueFrom"]["secretKeyRef"]
                for each in container["env"]
                if "valueFrom" in each
            }
            assert {each["name"] for each in secret.values()} == {SECRETS}
            assert "RAPID_API_KEYS" in secret
            plain = {each["name"] for each in container["env"]} - secret.keys()
            assert plain <= {"HF_HOME", "RAPID_HOME"}
        auth = service(name)["spec"]["rayClusterConfig"]["authOptions"]
        assert auth == {"mode": "token", "secretName": SECRETS}


def test_the_embedded_application_passes_the_door_as_it_is_deployed(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(service("one-node")["spec"]["serveConfigV2"])
    assert check(file).is_embedded
    (pod,) = pods("one-node")
    assert "volumes" not in pod  # its models are in the image


def test_a_group_s_nodes_are_one_replica_of_its_pool_each() -> None:
    _, config = serve_config("llama-8b-with-70b")
    assert node_groups(config) == [
        NodeGroup("target", cpus=5, gpus=1, min_nodes=1, max_nodes=8),
        NodeGroup("drafter", cpus=9, gpus=4, min_nodes=1, max_nodes=2),
        NodeGroup("retriever", cpus=8, gpus=1, min_nodes=1, max_nodes=1),
        NodeGroup("cpu", cpus=8, gpus=0, min_nodes=2, max_nodes=2),
    ]
    labels = {name: pool.node_labels[POOL_LABEL] for name, pool in config.pools.items()}
    assert labels["target"] == "target"
    assert labels["drafter"] == "drafter"
    assert labels["retriever"] == "retriever"
    assert {labels[name] for name in ("orchestrator", "ingress")} == {"cpu"}


@pytest.mark.parametrize(
    ("target", "drafter", "expected"),
    [
        ({"num_cpus": 0.1}, "target", []),
        (  # four replicas share a GPU, and with it a node
            {"num_gpus": 0.25, "num_cpus": 0, "min_replicas": 5, "max_replicas": 9},
            "target",
            [NodeGroup("target", 4, 1, 2, 3), NodeGroup("cpu", 8, 0, 1, 1)],
        ),
        (  # a pool may go to zero, and its nodes with it
            {"num_gpus": 1, "num_cpus": 0.5, "min_replicas": 0, "engine_cpus": 2},
            "prompt_lookup",
            [NodeGroup("target", 3, 1, 0, 1), NodeGroup("cpu", 8, 0, 1, 1)],
        ),
        (  # each replica takes two nodes
            {"num_gpus": 8, "nodes": 2, "num_cpus": 0.5, "engine_cpus": 4, "max_replicas": 3},
            "prompt_lookup",
            [NodeGroup("target", 5, 4, 2, 6), NodeGroup("cpu", 8, 0, 1, 1)],
        ),
    ],
)
def test_groups_of_other_pools(
    target: dict[str, Any], drafter: str, expected: list[NodeGroup]
) -> None:
    engine = MODEL | {"tensor_parallel": target["num_gpus"] if "nodes" in target else 1}
    settings = {"target": {"engine": engine, "pool": target}, "drafter": drafter}
    assert node_groups(ServeConfig.model_validate(settings)) == expected


def test_an_engine_on_a_cpu_has_its_threads_beside_it() -> None:
    engine = MODEL | {"threads": 6}
    settings = {
        "target": {"engine": MODEL, "pool": {"num_gpus": 1}},
        "drafter": {"engine": engine, "pool": {"min_replicas": 3, "max_replicas": 3}},
    }
    cpu = node_groups(ServeConfig.model_validate(settings))[-1]
    assert (cpu.min_nodes, cpu.cpus) == (3, 8)  # three times six threads, and the small pools


@pytest.mark.parametrize("name", ["", "8b", "a_b", "a.b", "A", "a" * 41, "a-"])
def test_names_that_kubernetes_refuses(name: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot name a service of Kubernetes"):
        manifests(ROOT / "serve_config.yaml", name)


def test_labels_of_the_file_s_own_are_not_dropped_silently(tmp_path: Path) -> None:
    settings = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    settings["applications"][0]["args"]["target"]["pool"]["node_labels"] = {"kind": "large"}
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigurationError, match=r"target\.pool\.node_labels: .* leave it out"):
        manifests(file, "any")


def test_the_control_store_outlives_the_head_where_pools_scale() -> None:
    component = yaml.safe_load((KUBERAY / "gcs-fault-tolerance/kustomization.yaml").read_text())
    (change,) = component["patches"]
    assert change["target"]["kind"] == "RayService"
    with_it = [
        name
        for name in SHIPPED
        if "../gcs-fault-tolerance"
        in yaml.safe_load((KUBERAY / name / "kustomization.yaml").read_text()).get("components", [])
    ]
    assert with_it == ["llama-8b-with-70b"]
    document = service(with_it[0])
    added = yaml.safe_load(change["patch"])["spec"]["rayClusterConfig"]
    document["spec"]["rayClusterConfig"] |= added
    assert schema_errors(document) == []
    password = added["gcsFaultToleranceOptions"]["redisPassword"]["valueFrom"]["secretKeyRef"]
    assert password["name"] == SECRETS


class TestBase:
    def of(self, kind: str) -> dict[str, Any]:
        documents = [yaml.safe_load(path.read_text()) for path in (KUBERAY / "base").iterdir()]
        (document,) = [each for each in documents if each["kind"] == kind]
        return document

    @pytest.mark.parametrize("kind", ["NetworkPolicy", "PodMonitor"])
    def test_it_is_of_its_schema_and_selects_every_pod(self, kind: str) -> None:
        document = self.of(kind)
        assert schema_errors(document) == []
        selector = document["spec"].get("podSelector") or document["spec"]["selector"]
        for name in SHIPPED:
            cluster = service(name)["spec"]["rayClusterConfig"]
            for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
                labels = group["template"]["metadata"]["labels"]
                assert selector["matchLabels"].items() <= labels.items()

    def test_ray_s_ports_are_closed_to_all_but_the_application_s_own_pods(self) -> None:
        spec = self.of("NetworkPolicy")["spec"]
        own, *others = spec["ingress"]
        assert spec["policyTypes"] == ["Ingress"]
        assert own == {"from": [{"podSelector": spec["podSelector"]}]}
        opened = {
            str((peer.get("podSelector") or peer["namespaceSelector"])["matchLabels"]): [
                port["port"] for port in rule["ports"]
            ]
            for rule in others
            for peer in rule["from"]
        }
        assert opened == {
            "{'app.kubernetes.io/name': 'kuberay-operator'}": [8265, 8000],
            "{'rapid-serve/client': 'true'}": [8000],
            "{'kubernetes.io/metadata.name': 'monitoring'}": [8080],
        }

    def test_prometheus_asks_a_port_that_the_pods_have(self) -> None:
        (endpoint,) = self.of("PodMonitor")["spec"]["podMetricsEndpoints"]
        (head,) = pods("one-node")
        ports = {each["name"]: each["containerPort"] for each in head["containers"][0]["ports"]}
        assert ports[endpoint["port"]] == 8080

    def test_the_kustomization_lists_its_files(self) -> None:
        listed = set(self.of("Kustomization")["resources"])
        assert listed == {p.name for p in (KUBERAY / "base").iterdir()} - {"kustomization.yaml"}
