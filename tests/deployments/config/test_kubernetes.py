"""The manifests of a configuration: what Kubernetes, Serve and Ray's autoscaler make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _generate_available_node_types_from_ray_cr_spec,
)
from ray.serve.schema import ServeDeploySchema

from deployments.app import compose
from deployments.config.kubernetes.pods import APP_LABELS, KEYS_FILE, POOL_LABEL, SECRETS, NodeGroup
from deployments.config.kubernetes.ray_service import manifests, node_groups
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


def documents(name: str, file: str) -> dict[str, dict[str, Any]]:
    """The documents of a file, by their kind."""
    found = list(yaml.safe_load_all((KUBERAY / name / file).read_text()))
    assert len({each["kind"] for each in found}) == len(found)
    return {each["kind"]: each for each in found}


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
        assert str(config.api.keys_file) == KEYS_FILE
        assert settings["proxy_location"] == "EveryNode"
        assert settings["http_options"] == {"host": "0.0.0.0", "port": 8000}

    def test_only_what_kubernetes_asks_for_differs_from_the_file(self, name: str) -> None:
        (application,) = yaml.safe_load((ROOT / SHIPPED[name]).read_text())["applications"]
        settings, _ = serve_config(name)
        (ours,) = settings["applications"]
        del ours["args"]["api"]["keys_file"]
        ours["args"].get("library", {}).pop("folder", None)
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

    def test_nothing_runs_as_root_or_writes_into_its_image(self, name: str) -> None:
        cluster = service(name)["spec"]["rayClusterConfig"]
        beside = cluster.get("autoscalerOptions")
        for pod in pods(name):
            assert pod["securityContext"]["runAsNonRoot"]
            assert pod["securityContext"]["runAsUser"] > 0
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            is_head = pod["containers"][0]["name"] == "ray-head"
            for container in [*pod["containers"], *([beside] if is_head and beside else [])]:
                assert container["securityContext"] == {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                }
                assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]
                assert {"name": "HOME", "value": "/tmp"} in container["env"]
                mounted = {each["name"] for each in container["volumeMounts"]}
                assert mounted <= {each["name"] for each in pod["volumes"]}
            assert {"name": "tmp", "emptyDir": {}} in pod["volumes"]

    def test_only_the_autoscaler_s_pod_may_ask_kubernetes(self, name: str) -> None:
        has_autoscaler = "autoscalerOptions" in service(name)["spec"]["rayClusterConfig"]
        for pod in pods(name):
            is_beside_it = has_autoscaler and pod["containers"][0]["name"] == "ray-head"
            assert pod.get("automountServiceAccountToken", True) == is_beside_it

    def test_no_secret_is_written_down_or_where_nobody_needs_it(self, name: str) -> None:
        _, config = serve_config(name)
        with_gpus = {pool for pool, each in config.pools.items() if each.num_gpus}
        cluster = service(name)["spec"]["rayClusterConfig"]
        groups = {each["groupName"]: each for each in cluster["workerGroupSpecs"]}
        for group in [cluster["headGroupSpec"], *groups.values()]:
            pool = group.get("groupName", "" if groups else "cpu")
            spec = group["template"]["spec"]
            (container,) = spec["containers"]
            keys = {
                each["valueFrom"]["secretKeyRef"]["key"]
                for each in container["env"]
                if "valueFrom" in each
            }
            names = {
                each["valueFrom"]["secretKeyRef"]["name"]
                for each in container["env"]
                if "valueFrom" in each
            } | {each["secret"]["secretName"] for each in spec["volumes"] if "secret" in each}
            assert names <= {SECRETS}
            mounts = {each["mountPath"] for each in container["volumeMounts"]}
            assert ("/etc/rapid/secrets" in mounts) == (pool == "cpu")
            has_retriever = pool == ("retriever" if "retriever" in with_gpus else "cpu")
            asks_qdrant = config.retriever.retrieval.store.is_shared
            assert ("qdrant_api_key" in keys) == (has_retriever and asks_qdrant)
            assert ("hf_token" in keys) == (bool(pool) and name != "one-node")
            plain = {each["name"]: each["value"] for each in container["env"] if "value" in each}
            assert not any("key" in each.lower() or "token" in each.lower() for each in plain)
        assert cluster["authOptions"] == {"mode": "token", "secretName": SECRETS}

    def test_a_node_is_emptied_before_it_ends(self, name: str) -> None:
        cluster = service(name)["spec"]["rayClusterConfig"]
        _, config = serve_config(name)
        drain_s = max(pool.graceful_shutdown_timeout_s for pool in config.pools.values())
        for group in cluster["workerGroupSpecs"]:
            spec = group["template"]["spec"]
            (container,) = spec["containers"]
            *command, notice = container["lifecycle"]["preStop"]["exec"]["command"]
            assert command == ["rapid", "drain", "--notice"]
            assert drain_s < int(notice) < spec["terminationGracePeriodSeconds"]

    def test_the_door_bounds_what_serve_does_not(self, name: str) -> None:
        found = documents(name, "gateway.yaml")
        assert [schema_errors(each) for each in found.values()] == [[]] * 5
        assert {each["metadata"]["name"] for each in found.values()} == {name}
        (listener,) = found["Gateway"]["spec"]["listeners"]
        assert (listener["protocol"], listener["tls"]["mode"]) == ("HTTPS", "Terminate")
        (rule,) = found["HTTPRoute"]["spec"]["rules"]
        assert rule["backendRefs"] == [{"name": f"{name}-serve-svc", "port": 8000}]
        _, config = serve_config(name)
        limit = int(found["BackendTrafficPolicy"]["spec"]["requestBuffer"]["limit"])
        assert config.api.max_body_bytes < limit < 1.1 * config.api.max_body_bytes
        waits = found["ClientTrafficPolicy"]["spec"]["timeout"]["http"]
        assert waits["requestReceivedTimeout"] == "60s"
        opened = found["NetworkPolicy"]["spec"]
        assert opened["podSelector"] == {"matchLabels": APP_LABELS}
        assert opened["ingress"][0]["ports"] == [{"port": 8000}]

    def test_machines_are_emptied_one_at_a_time(self, name: str) -> None:
        cluster = service(name)["spec"]["rayClusterConfig"]
        several = [each for each in cluster["workerGroupSpecs"] if each["minReplicas"] > 1]
        folder = KUBERAY / name
        assert (folder / "disruption-budgets.yaml").exists() == bool(several)
        listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
        assert ("disruption-budgets.yaml" in listed) == bool(several)
        for group in several:
            budget = documents(name, "disruption-budgets.yaml")["PodDisruptionBudget"]
            assert schema_errors(budget) == []
            assert budget["spec"]["minAvailable"] == group["minReplicas"] - 1
            labels = group["template"]["metadata"]["labels"]
            assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_two_nodes_of_a_group_are_two_machines() -> None:
    cluster = service("llama-8b-with-70b")["spec"]["rayClusterConfig"]
    for group in cluster["workerGroupSpecs"]:
        rules = group["template"]["spec"].get("topologySpreadConstraints", [])
        assert len(rules) == (group["maxReplicas"] > 1)
        for rule in rules:
            strictly = "DoNotSchedule" if group["groupName"] == "cpu" else "ScheduleAnyway"
            assert rule["whenUnsatisfiable"] == strictly
            labels = group["template"]["metadata"]["labels"]
            assert rule["labelSelector"]["matchLabels"] == labels


def test_a_lost_node_is_given_up_sooner_than_ray_does() -> None:
    cluster = service("one-gpu")["spec"]["rayClusterConfig"]
    (container,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    period, timeout, threshold = (
        int(variables[f"RAY_health_check_{each}"])
        for each in ("period_ms", "timeout_ms", "failure_threshold")
    )
    assert threshold * (period + timeout) == 15_000


def write(tmp_path: Path, **args: Any) -> Path:
    file = tmp_path / "serve.yaml"
    application = {"import_path": "deployments.app:build", "name": "rapid", "args": args}
    file.write_text(yaml.safe_dump({"applications": [application]}))
    return file


class TestGpusOfAKind:
    ENGINE: ClassVar[dict[str, Any]] = MODEL | {
        "host_cache_tokens": 64,
        "disk_cache_folder": "/var/lib/rapid/kv",
        "disk_cache_gib": 1,
    }
    RETRIEVER: ClassVar[dict[str, Any]] = {
        "retrieval": {"store": {"kind": "local", "folder": "/var/lib/rapid/chunks"}},
        "pool": {"max_replicas": 1},
    }

    def made(self, tmp_path: Path, accelerator: str) -> dict[str, Any]:
        pool = {"num_gpus": 1, "accelerator": accelerator}
        target = {"engine": self.ENGINE, "pool": pool}
        file = write(tmp_path, target=target, drafter="target", retriever=self.RETRIEVER)
        document: dict[str, Any] = yaml.safe_load(manifests(file, "any")["rayservice.yaml"])
        assert schema_errors(document) == []
        return document["spec"]["rayClusterConfig"]

    def test_a_pool_s_type_of_gpu_selects_machines(self, tmp_path: Path) -> None:
        cluster = self.made(tmp_path, "H100")
        target, cpu = cluster["workerGroupSpecs"]
        affinity = target["template"]["spec"]["affinity"]["nodeAffinity"]
        (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        (names,) = term["matchExpressions"]
        assert names["key"] == "nvidia.com/gpu.product"
        assert all(each.startswith("NVIDIA-H100") for each in names["values"])
        assert "affinity" not in cpu["template"]["spec"]
        nodes = _generate_available_node_types_from_ray_cr_spec(cluster)
        assert nodes["target"]["resources"]["accelerator_type:H100"] == 1
        assert "accelerator_type:H100" not in nodes["cpu"]["resources"]

    def test_an_unknown_type_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"target\.pool\.accelerator: .* H100"):
            self.made(tmp_path, "H1000")

    def test_what_is_kept_on_a_disk_has_a_volume_to_write_to(self, tmp_path: Path) -> None:
        target, cpu = (
            each["template"]["spec"]["containers"][0]["volumeMounts"]
            for each in self.made(tmp_path, "L4")["workerGroupSpecs"]
        )
        kv = {"name": "target-kv", "mountPath": "/var/lib/rapid/kv"}
        chunks = {"name": "retriever-chunks", "mountPath": "/var/lib/rapid/chunks"}
        assert [each in target for each in (kv, chunks)] == [True, False]
        assert [each in cpu for each in (kv, chunks)] == [False, True]


@pytest.mark.parametrize(
    ("api", "is_mounted", "variables"),
    [
        ({}, True, []),
        ({"keys_file": KEYS_FILE}, True, []),
        ({"keys_file": "/elsewhere"}, False, []),
        ({"keys_env": "KEYS"}, False, ["KEYS"]),
        ({"keys": [{"tenant": "t", "sha256": "a" * 64}]}, False, []),
    ],
)
def test_keys_are_where_the_configuration_looks_for_them(
    tmp_path: Path, api: dict[str, Any], is_mounted: bool, variables: list[str]
) -> None:
    file = write(tmp_path, target={"engine": MODEL}, drafter="target", api=api)
    document = yaml.safe_load(manifests(file, "any")["rayservice.yaml"])
    spec = document["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    (container,) = spec["containers"]
    mounts = [each["mountPath"] for each in container["volumeMounts"]]
    assert ("/etc/rapid/secrets" in mounts) == is_mounted
    assert [each["name"] for each in container["env"] if "valueFrom" in each] == variables


def test_the_embedded_application_passes_the_door_as_it_is_deployed(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(service("one-node")["spec"]["serveConfigV2"])
    assert check(file).is_embedded
    (pod,) = pods("one-node")
    assert "models" not in {each["name"] for each in pod["volumes"]}  # they are in the image


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


def test_several_nodes_do_not_share_a_folder(tmp_path: Path) -> None:
    settings = yaml.safe_load((ROOT / SHIPPED["one-gpu"]).read_text())
    settings["applications"][0]["args"]["library"] = {"folder": "/files"}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigurationError, match=r"set library\.database and library\.blobs"):
        manifests(path, "a")
