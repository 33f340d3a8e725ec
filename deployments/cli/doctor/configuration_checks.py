"""Checks of a configuration: its content, its models, its port, and the servers that it names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deployments.cli.addresses import why_taken
from deployments.cli.doctor.check_result import CheckResult, approve, refuse, warn
from deployments.cli.doctor.machine import Machine
from deployments.cli.doctor.subject import Subject

if TYPE_CHECKING:
    from retrieval.settings import ServerStoreConfig

_QDRANT_TIMEOUT_S = 2.5  # below the three seconds of all checks


def check_file(_: Machine, subject: Subject) -> CheckResult:
    """Check settings and checkpoints, as ``rapid check-config`` does, and how many nodes they need.

    The tokenizers of a pair are one vocabulary, or this is where it is said.
    """
    if subject.problem:
        return refuse(subject.problem)
    for config in subject.configs.values():
        for part in config.parts.values():
            if (nodes := part.settings.pool.nodes) > 1 and not subject.joins_cluster:
                return refuse(
                    f"{part.key}.pool.nodes: {nodes} needs a Ray of as many nodes, and this would "
                    "start one here",
                    "set RAY_ADDRESS to a cluster's, or leave nodes out",
                )
    models = [model for config in subject.configs.values() for model in config.served]
    names = ", ".join(repr(model.name) for model in models)
    is_pair = any(model.drafter not in (None, model.target) for model in models)
    return approve(
        f"{subject.path} serves {names}" + "; the models of a pair have one vocabulary" * is_pair
    )


def check_models(_: Machine, subject: Subject) -> CheckResult:
    """Check that the weights are here, or can be fetched."""
    from deployments.config.preflight import models_of
    from rapid.checkpoints.downloads.hub import find_hub_names, has_weights, is_offline

    names = sorted({name for config in subject.configs.values() for name in models_of(config)})
    if not names:
        return approve("none is known of")
    absent = [name for name in find_hub_names(names) if not has_weights(name)]
    if not absent:
        return approve(f"{len(names)} named, and all are here")
    fact = f"the weights of {', '.join(absent)} are not here"
    if subject.problem:  # which may be that they cannot be fetched
        return warn(fact, "first mend the configuration")
    if is_offline() and not subject.joins_cluster:
        return refuse(
            f"{fact}, and the hub cannot be asked for them",
            "check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or write the path of a copy",
        )
    return warn(
        f"{fact}: the first start fetches them, which can take long",
        "; ".join(f"hf download {name}" for name in absent),
    )


def check_port(_: Machine, subject: Subject) -> CheckResult:
    """Check that the HTTP port is free, or this folder's own server has it."""
    from deployments.cli.server.server_process import running_pid

    if subject.address is None:
        return approve("none is known of")
    host, port = subject.address
    if (pid := running_pid()) is not None:
        return approve(f"a server of this folder runs (process {pid})")
    if (problem := why_taken(host, port)) is None:
        return approve(f"{host}:{port} is free")
    fact, _colon, mend = problem.rpartition(": ")
    return refuse(fact, mend)


def check_qdrant(_: Machine, subject: Subject) -> CheckResult:
    """Check that the Qdrant servers that retrievers use answer, and are not too old."""
    from rapid.errors import first_line
    from retrieval.settings import OLDEST_QDRANT, ServerStoreConfig

    stores = {
        store.address: store
        for config in subject.configs.values()
        for served in config.served
        if served.retriever is not None
        if isinstance(store := served.config.retriever.retrieval.store, ServerStoreConfig)
    }
    if not stores:
        return approve("no server is used")
    told = []
    for address, store in stores.items():
        try:
            version = _version_of(store)
        except Exception as error:  # of the HTTP client, or of what answers in its place
            return warn(
                f"{address} does not answer as Qdrant does ({first_line(error)}), and without it "
                "nothing is retrieved",
                "start it, or correct retrieval.store.url and its api_key_env",
            )
        if tuple(map(int, version.split(".")[:2])) < OLDEST_QDRANT:
            least = ".".join(map(str, OLDEST_QDRANT))
            return refuse(f"{address} is Qdrant {version}", f"upgrade it to {least}")
        told.append(f"{address} is Qdrant {version}")
    return approve(", ".join(told))


def _version_of(store: ServerStoreConfig) -> str:
    import httpx

    key = store.key()
    headers = {} if key is None else {"api-key": key}
    answer = httpx.get(store.url, headers=headers, timeout=_QDRANT_TIMEOUT_S)
    return str(answer.raise_for_status().json()["version"])
