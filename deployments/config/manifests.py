"""Kubernetes manifests of an application, made from its Serve configuration file.

A `RayService` of KubeRay holds the file, changed where Kubernetes asks for it, and a Ray cluster
that has exactly the nodes that the file's pools need: one group of nodes for every pool with GPUs,
each node as large as one replica (or its part on one of several nodes), and one group for all pools
without. The groups' nodes carry a label that their pools' replicas ask for, so that no one-GPU
replica takes a node that a group of four needs whole. An application without GPUs runs on one node,
the head.

What no configuration changes, network policies and monitoring, is in ``deploy/kuberay/base``.
"""

from __future__ import annotations

import copy
import importlib.metadata
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.placement import PoolConfig
from deployments.config.serve_config import EnginePoolConfig, ServeConfig
from deployments.config.serve_file import applications_of
from rapid.config_errors import read_yaml, validated
from rapid.errors import ConfigurationError
from retrieval.config import LexicalEmbedderConfig, ServerStoreConfig

SECRETS = "rapid-secrets"
POOL_LABEL = "rapid-serve/pool"
_APP_LABELS = {"app.kubernetes.io/part-of": "rapid-serve"}
_KEYS_ENV = "RAPID_API_KEYS"
_MODELS = "/models"
_CPU_GROUP = "cpu"
_HTTP_PORT = 8000  # of Ray Serve, as KubeRay expects it
_METRICS_PORT = 8080  # of Ray's metrics, as KubeRay sets it
_NODE_CPUS = 8  # for replicas without GPUs on one node
_DAEMON_CPUS = 1  # of a node beside its replicas: Ray's own processes and the proxy
_HEAD_CPUS = 2
_ENGINE_THREADS = 4  # of an engine on a CPU that does not say
_GIB_PER_CPU = 4
_GIB_PER_GPU = 32
_USER = 1000  # in the image, as in deploy/Dockerfile


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes of one size, which the autoscaler adds and removes.

    Attributes:
        name: Name of the group, and value of its nodes' label `POOL_LABEL`.
        cpus: CPUs of a node for replicas.
        gpus: GPUs of a node.
        min_nodes: Fewest nodes.
        max_nodes: Most nodes.
    """

    name: str
    cpus: int
    gpus: int
    min_nodes: int
    max_nodes: int


def manifests(path: Path, name: str) -> dict[str, str]:
    """Return the content of the files of a configuration's folder, by file name.

    Args:
        path: The Serve configuration file.
        name: Name of the service, a DNS label.

    Raises:
        ConfigurationError: The file or the name cannot be used.
    """
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
        raise ConfigurationError(
            f"{name!r} cannot name a service of Kubernetes: take at most 40 lower-case letters, "
            "digits and hyphens that begin with a letter"
        )
    settings = read_yaml(path, "serve_config.yaml")
    if len(applications_of(settings)) > 1:
        raise ConfigurationError("the manifests are for one application: write a file for each")
    args = applications_of(settings)[0].get("args") or {}
    config = validated(ServeConfig, args, prefix=f"{path}: ", top="args")
    for role, pool in config.pools.items():
        if pool.node_labels:
            raise ConfigurationError(
                f"{role}.pool.node_labels: the manifests label nodes by their pools: leave it out"
            )
        if pool.nodes > 1 and not pool.num_gpus:
            raise ConfigurationError(
                f"{role}.pool.nodes: the manifests have one node for engines without GPUs: leave "
                "it out, or set num_gpus"
            )
    groups = node_groups(config)
    header = f"# Made by `rapid manifests {path} {name}`: change the configuration instead.\n"
    service = _ray_service(name, config, groups, _serve_config(settings, config, groups))
    return {
        "rayservice.yaml": header + _dump(service),
        "kustomization.yaml": header + _dump(_kustomization(groups)),
    }


def node_groups(config: ServeConfig) -> list[NodeGroup]:
    """Return the groups of nodes that an application needs; none where the head is enough."""
    with_gpus, without = [], []
    for name, pool, cpus in _pools(config):
        if not pool.num_gpus:
            without.append((pool, cpus))
            continue
        per_node = int(1 / pool.num_gpus) or 1  # replicas that share a GPU share the node
        group = NodeGroup(
            name,
            math.ceil(cpus * per_node),
            math.ceil(pool.num_gpus / pool.nodes),
            math.ceil(pool.min_replicas * pool.nodes / per_node),
            math.ceil(pool.max_replicas * pool.nodes / per_node),
        )
        with_gpus.append(group)
    if not with_gpus:
        return []
    size = max(_NODE_CPUS, *(math.ceil(cpus) for _, cpus in without))
    fewest = sum(pool.min_replicas * cpus for pool, cpus in without)
    most = sum(pool.max_replicas * cpus for pool, cpus in without)
    apart = min(2, max(pool.min_replicas for pool, _ in without))  # one node may be lost
    min_nodes = max(1, apart, math.ceil(fewest / size))
    cpu_group = NodeGroup(_CPU_GROUP, size, 0, min_nodes, max(min_nodes, math.ceil(most / size)))
    return [*with_gpus, cpu_group]


def _pools(config: ServeConfig) -> Iterator[tuple[str, PoolConfig, float]]:
    """Yield the name and settings of every pool of its own, and the CPUs of one replica."""
    for name, pool in config.pools.items():
        section = {"target": config.target, "drafter": config.drafter}.get(name)
        if isinstance(section, EnginePoolConfig):
            threads = section.engine.threads or _ENGINE_THREADS
            yield name, pool, pool.num_cpus + (pool.engine_cpus if pool.num_gpus else threads)
        elif section is None:
            yield name, pool, pool.num_cpus


def _serve_config(
    settings: dict[str, Any], config: ServeConfig, groups: list[NodeGroup]
) -> dict[str, Any]:
    """Return the Serve configuration as it runs on Kubernetes."""
    changed = copy.deepcopy(settings)
    changed["proxy_location"] = "EveryNode"  # KubeRay takes a worker without a proxy for unready
    http = {"host": "0.0.0.0", "port": _HTTP_PORT}  # network policies say who reaches it
    changed["http_options"] = changed.get("http_options", {}) | http
    args = applications_of(changed)[0]["args"]
    if not config.api.has_keys:
        args.setdefault("api", {})["keys_env"] = _KEYS_ENV
    names = {group.name for group in groups}
    for name, _, _ in _pools(config) if groups else ():
        section = args.setdefault("api" if name == "ingress" else name, {})
        label = {POOL_LABEL: name if name in names else _CPU_GROUP}
        section["pool"] = section.get("pool", {}) | {"node_labels": label}
    return changed


def _ray_service(
    name: str, config: ServeConfig, groups: list[NodeGroup], serve_config: dict[str, Any]
) -> dict[str, Any]:
    head_cpus = _HEAD_CPUS if groups else _cpus_of_one_node(config)
    cluster: dict[str, Any] = {
        "rayVersion": importlib.metadata.version("ray"),
        "authOptions": {"mode": "token", "secretName": SECRETS},
    }
    if groups:
        cluster["enableInTreeAutoscaling"] = True
        cluster["autoscalerOptions"] = {"version": "v2"}  # knows labels
    cluster["headGroupSpec"] = {
        "rayStartParams": {"num-cpus": str(0 if groups else head_cpus)},
        "template": _pod(config, "ray-head", head_cpus, 0),
    }
    cluster["workerGroupSpecs"] = [
        {
            "groupName": group.name,
            "replicas": group.min_nodes,
            "minReplicas": group.min_nodes,
            "maxReplicas": group.max_nodes,
            "labels": {POOL_LABEL: group.name},
            "rayStartParams": {"num-cpus": str(group.cpus)},
            "template": _pod(config, "ray-worker", group.cpus, group.gpus),
        }
        for group in groups
    ]
    drain_s = max(pool.graceful_shutdown_timeout_s for pool in config.pools.values())
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": name, "labels": _APP_LABELS},
        "spec": {
            "excludeHeadPodFromServeSvc": bool(groups),
            # A new cluster answers new requests while the old one finishes its own.
            "rayClusterDeletionDelaySeconds": math.ceil(drain_s),
            "serveConfigV2": yaml.safe_dump(serve_config, sort_keys=False),
            "rayClusterConfig": cluster,
        },
    }


def _cpus_of_one_node(config: ServeConfig) -> int:
    """Return the CPUs of an application on one node, whose engines share them when pools grow."""
    computing = sum(max(1, pool.min_replicas) * cpus for _, pool, cpus in _pools(config))
    reserved = sum(pool.max_replicas * pool.num_cpus for _, pool, _ in _pools(config))
    return math.ceil(max(computing, reserved))


def _pod(config: ServeConfig, container: str, cpus: int, gpus: int) -> dict[str, Any]:
    gib = _GIB_PER_GPU * gpus or _GIB_PER_CPU * cpus
    resources: dict[str, Any] = {"cpu": str(cpus + _DAEMON_CPUS), "memory": f"{gib}Gi"}
    if gpus:
        resources["nvidia.com/gpu"] = str(gpus)
    spec: dict[str, Any] = {
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": container,
                "image": f"rapid-serve:{'cuda' if gpus else 'cpu'}",
                "ports": [
                    {"name": "serve", "containerPort": _HTTP_PORT},
                    {"name": "metrics", "containerPort": _METRICS_PORT},
                ],
                "env": _environment(config),
                "resources": {"requests": resources, "limits": dict(resources)},
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                },
            }
        ],
    }
    if gpus:
        gpu = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        spec["tolerations"] = [gpu]
    if not _is_in_the_image(config):
        spec["containers"][0]["volumeMounts"] = [{"name": "models", "mountPath": _MODELS}]
        claim = {"claimName": "rapid-models"}
        spec["volumes"] = [{"name": "models", "persistentVolumeClaim": claim}]
    return {"metadata": {"labels": dict(_APP_LABELS)}, "spec": spec}


def _environment(config: ServeConfig) -> list[dict[str, Any]]:
    """Return the variables of every container; every node may run any part of the application."""
    environment = []
    if config.api.keys_env or not config.api.keys:
        environment.append(_secret(config.api.keys_env or _KEYS_ENV, "api_keys"))
    store = config.retriever.retrieval.store
    if isinstance(store, ServerStoreConfig) and store.api_key_env:
        environment.append(_secret(store.api_key_env, "qdrant_api_key"))
    if not _is_in_the_image(config):
        environment.append(_secret("HF_TOKEN", "hf_token", optional=True))
        environment.append({"name": "HF_HOME", "value": f"{_MODELS}/huggingface"})
        environment.append({"name": "RAPID_HOME", "value": f"{_MODELS}/rapid"})
    return environment


def _secret(variable: str, key: str, **more: bool) -> dict[str, Any]:
    return {
        "name": variable,
        "valueFrom": {"secretKeyRef": {"name": SECRETS, "key": key, **more}},
    }


def _is_in_the_image(config: ServeConfig) -> bool:
    """Return whether all models are part of this package."""
    engines = (config.target.engine, config.drafter_pool.engine)
    return isinstance(config.retriever.retrieval.embedder, LexicalEmbedderConfig) and all(
        engine.model.startswith("embedded:") for engine in engines
    )


def _kustomization(groups: list[NodeGroup]) -> dict[str, Any]:
    kustomization: dict[str, Any] = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "rapid",
        "resources": ["../base", "rayservice.yaml"],
    }
    if any(group.max_nodes > group.min_nodes for group in groups):
        kustomization["components"] = ["../gcs-fault-tolerance"]
    return kustomization


class _Dumper(yaml.SafeDumper):
    """A dumper that writes texts of several lines as blocks and repeats what is shared."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _dump(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=100)
