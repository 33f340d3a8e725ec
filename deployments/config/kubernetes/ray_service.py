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

import importlib.metadata
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from cluster.placement import PoolConfig
from deployments.config.kubernetes.gateways import GATEWAY_COMMENT, gateway
from deployments.config.kubernetes.pods import (
    APP_LABELS,
    HTTP_PORT,
    KEYS_FILE,
    LIBRARY_FOLDER,
    POOL_LABEL,
    SECRETS,
    NodeGroup,
    autoscaler_options,
    has_folder,
    head_template,
    worker_template,
)
from deployments.config.named_models import read_application
from deployments.config.pools.pool_settings import EnginePoolConfig
from deployments.config.serve_config import ApplicationConfig
from deployments.config.serve_file import applications_of
from rapid.config_errors import read_yaml
from rapid.errors import ConfigurationError

_CPU_GROUP = "cpu"
_NODE_CPUS = 8  # for replicas without GPUs on one node
_HEAD_CPUS = 2  # for a head that runs no replicas; not measured
_ENGINE_THREADS = 4  # of an engine on a CPU that does not say


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
    config = read_application(applications_of(settings)[0].get("args") or {}, f"{path}: ")
    for part in config.parts.values():
        pool = part.settings.pool
        if pool.node_labels:
            raise ConfigurationError(
                f"{part.key}.pool.node_labels: the manifests label nodes by their pools: leave "
                "it out"
            )
        if pool.nodes > 1 and not pool.num_gpus:
            raise ConfigurationError(
                f"{part.key}.pool.nodes: the manifests have one node for engines without GPUs: "
                "leave it out, or set num_gpus"
            )
    groups = node_groups(config)
    if groups and has_folder(config):
        raise ConfigurationError(
            "library: several nodes cannot share a folder: set library.database and library.blobs"
        )
    header = f"# Made by `rapid manifests {path} {name}`: change the configuration instead.\n"
    service = _ray_service(name, config, groups, _serve_config(settings, config, groups))
    budgets = disruption_budgets(name, groups)
    return {
        "rayservice.yaml": header + _dump(service),
        **({"disruption-budgets.yaml": header + _dump(*budgets)} if budgets else {}),
        "kustomization.yaml": header + _dump(_kustomization(groups, has_budgets=bool(budgets))),
        "gateway.yaml": header + GATEWAY_COMMENT + _dump(*gateway(name, config)),
    }


def node_groups(config: ApplicationConfig) -> list[NodeGroup]:
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


def _pools(config: ApplicationConfig) -> Iterator[tuple[str, PoolConfig, float]]:
    """Yield the name and settings of every pool, and the CPUs of one replica."""
    for name, part in config.parts.items():
        settings, pool = part.settings, part.settings.pool
        cpus = 0.0
        if isinstance(settings, EnginePoolConfig):
            threads = settings.engine.threads or _ENGINE_THREADS
            cpus = pool.engine_cpus if pool.num_gpus else threads
        yield name, pool, pool.num_cpus + cpus


def _serve_config(
    settings: dict[str, Any], config: ApplicationConfig, groups: list[NodeGroup]
) -> dict[str, Any]:
    """Return the Serve configuration as it runs on Kubernetes."""
    # A copy in which what YAML's anchors share is apart.
    changed: dict[str, Any] = json.loads(json.dumps(settings))
    changed["proxy_location"] = "EveryNode"  # KubeRay takes a worker without a proxy for unready
    http = {"host": "0.0.0.0", "port": HTTP_PORT}  # network policies say who reaches it
    changed["http_options"] = changed.get("http_options", {}) | http
    args = applications_of(changed)[0]["args"]
    if not config.api.has_keys:
        args.setdefault("api", {})["keys_file"] = KEYS_FILE
    if has_folder(config):
        args["library"] = (args["library"] or {}) | {"folder": LIBRARY_FOLDER}
    names = {group.name for group in groups}
    for name, part in config.parts.items() if groups else ():
        section = args
        for key in part.section:
            section = section.setdefault(key, {})
        label = {POOL_LABEL: name if name in names else _CPU_GROUP}
        section["pool"] = section.get("pool", {}) | {"node_labels": label}
    return changed


def _ray_service(
    name: str, config: ApplicationConfig, groups: list[NodeGroup], serve_config: dict[str, Any]
) -> dict[str, Any]:
    head_cpus = _HEAD_CPUS if groups else _cpus_of_one_node(config)
    drain_s = math.ceil(max(pool.graceful_shutdown_timeout_s for pool in config.pools.values()))
    cluster: dict[str, Any] = {
        "rayVersion": importlib.metadata.version("ray"),
        "authOptions": {"mode": "token", "secretName": SECRETS},
    }
    if groups:
        cluster["enableInTreeAutoscaling"] = True
        cluster["autoscalerOptions"] = autoscaler_options()
    cluster["headGroupSpec"] = {
        "rayStartParams": {"num-cpus": str(0 if groups else head_cpus)},
        "template": head_template(config, head_cpus, runs_all=not groups),
    }
    cluster["workerGroupSpecs"] = [
        {
            "groupName": group.name,
            "replicas": group.min_nodes,
            "minReplicas": group.min_nodes,
            "maxReplicas": group.max_nodes,
            "labels": {POOL_LABEL: group.name},
            "rayStartParams": _start_params(config, group),
            "template": worker_template(config, group, drain_s),
        }
        for group in groups
    ]
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": name, "labels": APP_LABELS},
        "spec": {
            "excludeHeadPodFromServeSvc": bool(groups),
            # A new cluster answers new requests while the old one finishes its own.
            "rayClusterDeletionDelaySeconds": drain_s,
            "serveConfigV2": yaml.safe_dump(serve_config, sort_keys=False),
            "rayClusterConfig": cluster,
        },
    }


def _cpus_of_one_node(config: ApplicationConfig) -> int:
    """Return the CPUs of an application on one node, whose engines share them when pools grow."""
    computing = sum(max(1, pool.min_replicas) * cpus for _, pool, cpus in _pools(config))
    reserved = sum(pool.max_replicas * pool.num_cpus for _, pool, _ in _pools(config))
    return math.ceil(max(computing, reserved))


def _start_params(config: ApplicationConfig, group: NodeGroup) -> dict[str, str]:
    """Return the arguments of `ray start`.

    Ray finds the type of a GPU by itself; its autoscaler must know it before there is a node.
    """
    params = {"num-cpus": str(group.cpus)}
    accelerator = config.pools[group.name].accelerator if group.gpus else None
    if accelerator:
        params["resources"] = json.dumps(json.dumps({f"accelerator_type:{accelerator}": 1}))
    return params


def disruption_budgets(name: str, groups: list[NodeGroup]) -> list[dict[str, Any]]:
    """Return the budgets by which machines are emptied one at a time.

    A group that may have one node has none, as it would keep that node's machine for ever.
    """
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": f"{name}-{group.name}", "labels": APP_LABELS},
            "spec": {
                # Not `maxUnavailable`, for which pods need an owner that can be scaled.
                "minAvailable": group.min_nodes - 1,
                "selector": {"matchLabels": {**APP_LABELS, POOL_LABEL: group.name}},
            },
        }
        for group in groups
        if group.min_nodes > 1
    ]


def _kustomization(groups: list[NodeGroup], *, has_budgets: bool) -> dict[str, Any]:
    kustomization: dict[str, Any] = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "rapid",
        "resources": ["../base", "rayservice.yaml"],
    }
    if has_budgets:
        kustomization["resources"].append("disruption-budgets.yaml")
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


def _dump(*documents: dict[str, Any]) -> str:
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=100)
