"""The pods of an application's Ray nodes, as Kubernetes runs them.

A pod gets what the parts of the application need that may run on it: Ray's head on a cluster of
several nodes runs none, and has no secret of theirs. No container writes into its image: Ray,
Triton and torch write into a folder for temporary files, an engine's disk tier and a retriever's
documents into their own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from deployments.config.pools.pool_settings import RetrieverPoolConfig
from deployments.config.serve_config import ApplicationConfig
from rapid.errors import ConfigurationError
from retrieval.settings import LexicalEmbedderConfig, ServerStoreConfig

Json = dict[str, Any]

SECRETS = "rapid-secrets"
POOL_LABEL = "rapid-serve/pool"
APP_LABELS = {"app.kubernetes.io/part-of": "rapid-serve"}
HTTP_PORT = 8000  # of Ray Serve, as KubeRay expects it
KEYS_FILE = "/etc/rapid/secrets/api_keys"
LIBRARY_FOLDER = "/var/lib/rapid"

_METRICS_PORT = 8080  # of Ray's metrics, as KubeRay sets it
_MODELS = "/models"
_KEYS_FOLDER, _, _KEYS_KEY = KEYS_FILE.rpartition("/")
_TEMPORARY = {"name": "tmp", "mountPath": "/tmp"}
_HOME = {"name": "HOME", "value": "/tmp"}  # caches of Triton and of libraries
_DAEMON_CPUS = 1  # of a node beside its replicas: Ray's own processes and the proxy
_GIB_PER_CPU = 4  # what most machines have
_GIB_PER_GPU = 32  # weights are mapped from files; Ray's object store takes 30 %
_USER = 1000  # in the image, as in deploy/Dockerfile
_GRACE_S = 30  # of a pod that ends, beside the time in which its replicas finish

# A node is given up after 15 s without a sign of life, not after Ray's 65: what `make
# test-faults-nodes` tries.
_HEALTH_CHECKS = {
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}

# What NVIDIA's GPU feature discovery calls the GPUs of Ray's types.
_GPU_PRODUCTS = {
    "A10G": ["NVIDIA-A10G"],
    "L4": ["NVIDIA-L4"],
    "L40S": ["NVIDIA-L40S"],
    "A100": [
        "NVIDIA-A100-SXM4-40GB",
        "NVIDIA-A100-SXM4-80GB",
        "NVIDIA-A100-PCIE-40GB",
        "NVIDIA-A100-80GB-PCIe",
    ],
    "H100": ["NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe", "NVIDIA-H100-NVL"],
    "H200": ["NVIDIA-H200", "NVIDIA-H200-NVL"],
    "B200": ["NVIDIA-B200"],
}

LOCKED_CONTAINER: Json = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


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


def worker_template(config: ApplicationConfig, group: NodeGroup, drain_s: int) -> Json:
    """Return the template of a group's pods.

    Before it ends, a pod waits until what runs on it has gone on elsewhere or is finished.

    Args:
        config: The application's settings.
        group: The nodes.
        drain_s: Longest time in which a replica finishes its answers, in seconds.

    Raises:
        ConfigurationError: The type of the group's GPUs is unknown.
    """
    with_gpus = {name for name, pool in config.pools.items() if pool.num_gpus}
    parts = {group.name} if group.gpus else config.pools.keys() - with_gpus
    template = _template(config, "ray-worker", group.cpus, group.gpus, parts)
    template["metadata"]["labels"][POOL_LABEL] = group.name
    spec, (container,) = template["spec"], template["spec"]["containers"]
    spec["automountServiceAccountToken"] = False
    notice_s = drain_s + _GRACE_S  # longer, so that replicas serve until others run elsewhere
    command = ["rapid", "drain", "--notice", str(notice_s)]
    container["lifecycle"] = {"preStop": {"exec": {"command": command}}}
    spec["terminationGracePeriodSeconds"] = notice_s + _GRACE_S
    if group.max_nodes > 1:
        spec["topologySpreadConstraints"] = [_spread(group)]
    if group.gpus:
        gpu = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        spec["tolerations"] = [gpu]
        if accelerator := config.pools[group.name].accelerator:
            spec["affinity"] = {
                "nodeAffinity": _has_gpus_of(accelerator, config.parts[group.name].key)
            }
    return template


def head_template(config: ApplicationConfig, cpus: int, *, runs_all: bool) -> Json:
    """Return the template of the head's pod.

    Args:
        config: The application's settings.
        cpus: CPUs of the node.
        runs_all: Whether the application runs on this one node, instead of on workers.
    """
    template = _template(config, "ray-head", cpus, 0, config.pools.keys() if runs_all else ())
    if runs_all:
        template["spec"]["automountServiceAccountToken"] = False
    else:  # the autoscaler beside it asks Kubernetes for pods
        environment = template["spec"]["containers"][0]["env"]
        environment += [{"name": name, "value": each} for name, each in _HEALTH_CHECKS.items()]
    return template


def autoscaler_options() -> Json:
    """Return the options of Ray's autoscaler, a container beside the head's."""
    return {
        "version": "v2",  # knows labels
        "env": [_HOME],
        "volumeMounts": [_TEMPORARY],
        "securityContext": LOCKED_CONTAINER,
    }


def _template(
    config: ApplicationConfig, container: str, cpus: int, gpus: int, parts: Collection[str]
) -> Json:
    gib = _GIB_PER_GPU * gpus or _GIB_PER_CPU * cpus
    resources: Json = {"cpu": str(cpus + _DAEMON_CPUS), "memory": f"{gib}Gi"}
    if gpus:
        resources["nvidia.com/gpu"] = str(gpus)
    volumes = _volumes(config, parts)
    spec: Json = {
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
                    {"name": "serve", "containerPort": HTTP_PORT},
                    {"name": "metrics", "containerPort": _METRICS_PORT},
                ],
                "env": [_HOME, *_environment(config, parts)],
                "resources": {"requests": resources, "limits": dict(resources)},
                "securityContext": LOCKED_CONTAINER,
                "volumeMounts": [mount for mount, _ in volumes],
            }
        ],
        "volumes": [{"name": mount["name"]} | source for mount, source in volumes],
    }
    return {"metadata": {"labels": dict(APP_LABELS)}, "spec": spec}


def _volumes(config: ApplicationConfig, parts: Collection[str]) -> list[tuple[Json, Json]]:
    """Return where a pod mounts its volumes, and what each of them is."""
    volumes: list[tuple[Json, Json]] = [(_TEMPORARY, {"emptyDir": {}})]
    if "ingress" in parts and _reads_keys_file(config):
        # Not a `subPath`, which would keep the content that it was mounted with.
        mount = {"name": "api-keys", "mountPath": _KEYS_FOLDER, "readOnly": True}
        items = [{"key": _KEYS_KEY, "path": _KEYS_KEY}]
        volumes.append((mount, {"secret": {"secretName": SECRETS, "items": items}}))
    if parts and not is_in_the_image(config):
        claim = {"persistentVolumeClaim": {"claimName": "rapid-models"}}
        volumes.append(({"name": "models", "mountPath": _MODELS}, claim))
    if "librarian" in parts and has_folder(config):
        claim = {"persistentVolumeClaim": {"claimName": "rapid-library"}}
        volumes.append(({"name": "library", "mountPath": LIBRARY_FOLDER}, claim))
    folders = {
        (name, "kv"): part.settings.engine.disk_cache_folder
        for name, part in config.engine_parts.items()
    } | {
        (name, "chunks"): getattr(retriever.retrieval.store, "folder", None)
        for name, retriever in _retrievers(config).items()
    }
    for (name, kind), folder in sorted(folders.items()):
        is_mounted = any(folder == each["mountPath"] for each, _ in volumes)
        if name in parts and folder is not None and not is_mounted:
            volume = f"{name}-{kind}".replace(".", "-")  # which Kubernetes asks for
            volumes.append(({"name": volume, "mountPath": folder}, {"emptyDir": {}}))
    return volumes


def has_folder(config: ApplicationConfig) -> bool:
    """Return whether files are kept in a folder of the one node."""
    return config.library is not None and config.library.database is None


def _environment(config: ApplicationConfig, parts: Collection[str]) -> list[Json]:
    """Return the variables of a container, beside those that KubeRay sets."""
    environment = []
    if "ingress" in parts and config.api.keys_env:
        environment.append(_secret(config.api.keys_env, _KEYS_KEY))
    variables = {
        store.api_key_env
        for name, retriever in _retrievers(config).items()
        if isinstance(store := retriever.retrieval.store, ServerStoreConfig) and name in parts
    }
    for variable in sorted(filter(None, variables)):
        environment.append(_secret(variable, "qdrant_api_key"))
    if parts and not is_in_the_image(config):
        environment.append(_secret("HF_TOKEN", "hf_token", optional=True))
        environment.append({"name": "HF_HOME", "value": f"{_MODELS}/huggingface"})
        environment.append({"name": "RAPID_HOME", "value": f"{_MODELS}/rapid"})
    return environment


def _secret(variable: str, key: str, **more: bool) -> Json:
    return {
        "name": variable,
        "valueFrom": {"secretKeyRef": {"name": SECRETS, "key": key, **more}},
    }


def _reads_keys_file(config: ApplicationConfig) -> bool:
    """Return whether the ingress reads the mounted file, which it does without keys of its own."""
    keys_file = config.api.keys_file
    return str(keys_file) == KEYS_FILE if keys_file else not config.api.has_keys


def is_in_the_image(config: ApplicationConfig) -> bool:
    """Return whether all models are part of this package."""
    engines = config.engine_parts.values()
    return all(part.settings.engine.model.startswith("embedded:") for part in engines) and all(
        isinstance(retriever.retrieval.embedder, LexicalEmbedderConfig)
        for retriever in _retrievers(config).values()
    )


def _retrievers(config: ApplicationConfig) -> dict[str, RetrieverPoolConfig]:
    """Return the settings of every retriever, by its pool's name."""
    parts = [model.retriever for model in config.served]
    return {part.pool_name: part.settings for part in parts if part is not None}


def _spread(group: NodeGroup) -> Json:
    """Return the rule that a group's pods stand on different machines.

    Pods without GPUs have to, since one machine may be lost; those with GPUs do where they can.
    """
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway" if group.gpus else "DoNotSchedule",
        "nodeTaintsPolicy": "Honor",  # a machine that takes none of them does not count as empty
        "labelSelector": {"matchLabels": {**APP_LABELS, POOL_LABEL: group.name}},
        "matchLabelKeys": ["ray.io/cluster"],  # an upgrade runs a second one beside it
    }


def _has_gpus_of(accelerator: str, section: str) -> Json:
    products = _GPU_PRODUCTS.get(accelerator)
    if products is None:
        raise ConfigurationError(
            f"{section}.pool.accelerator: the manifests know no machines with {accelerator!r}: "
            f"give one of {', '.join(_GPU_PRODUCTS)}, or leave it out and select machines in a "
            "kustomization of yours"
        )
    names = {"key": "nvidia.com/gpu.product", "operator": "In", "values": products}
    terms = [{"matchExpressions": [names]}]
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
