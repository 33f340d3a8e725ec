"""A local Ray for the whole test session, with two applications: the real one and one of fakes.

Starting costs seconds, so everything that needs Ray shares these. The fakes are the real
application with `FakeEngine` in its pools: same leases, same loop, same API.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rapid.chat_messages import Message
from rapid.messages import GenerateRequest, SpeculationRequest
from tests.ports import free_port

ROOT = Path(__file__).parent.parent
FAKES = "fakes"
REAL = "rapid"
# Spans go to files, of requests alone whose caller traces them.
TRACING = {
    "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH": (
        "ray.serve._private.tracing_utils:default_tracing_exporter"
    ),
    "RAY_SERVE_TRACING_SAMPLING_RATIO": "0",
}
BEFORE_EXPIRY_S = 5.4  # a lease of the fakes expires after six seconds
BLOCKS_OPENED = Path(tempfile.gettempdir()) / "rapid-tests-blocks-opened"


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """A private Ray with Serve on loopback; its HTTP address."""
    import ray
    from ray import serve

    temp_dir = tempfile.mkdtemp(prefix="rapid-", dir="/tmp")  # short: socket paths are limited
    port = free_port()
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as environment:
        warnings.simplefilter("ignore")
        for name, value in TRACING.items():
            environment.setenv(name, value)
        ray.init(
            num_cpus=4,
            num_gpus=5,  # logical: for placement, nothing computes on them
            include_dashboard=False,
            log_to_driver=False,
            namespace="rapid-tests",
            _temp_dir=temp_dir,
            _node_ip_address="127.0.0.1",
            _system_config={"metrics_report_interval_ms": 1000},
        )
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        yield f"http://127.0.0.1:{port}"
        end_ray()
    shutil.rmtree(temp_dir, ignore_errors=True)


def end_ray() -> None:
    """End the private Ray, if it runs."""
    import ray
    from ray import serve

    if ray.is_initialized():
        serve.shutdown()
        ray.shutdown()


def end_application(fixture: str) -> None:
    """End the application of a fixture, if it runs."""
    from ray import serve

    name = {"fakes": FAKES, "application": REAL}[fixture]
    if name in serve.status().applications:
        serve.delete(name)


@pytest.fixture(scope="session")
def application(ray_cluster: str) -> str:
    """The application of `serve_config.yaml`, but that it always drafts; its HTTP address.

    On a busy machine without a GPU, drafting seldom pays: most tests would test plain decoding.
    """
    from ray import serve

    from deployments.app import compose

    serve.run(compose(real_config(draft_length="fixed")), name=REAL, route_prefix="/")
    return ray_cluster


def real_config(**orchestrator: Any) -> Any:
    """The settings of `serve_config.yaml` with these of the orchestrator."""
    config = shipped_config()
    settings = config.orchestrator.model_copy(update=orchestrator)
    return config.model_copy(update={"orchestrator": settings})


def shipped_config() -> Any:
    """The settings of `serve_config.yaml`, with a library of the tests' own."""
    from deployments.app import check

    config = check(ROOT / "serve_config.yaml")
    folder = Path(tempfile.mkdtemp(prefix="rapid-library-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = config.library.model_copy(update={"folder": folder})
    return config.model_copy(update={"library": library})


@dataclass(frozen=True)
class Fakes:
    """The application of fakes: its address and handles."""

    url: str
    orchestrator: Any
    target: Any
    drafter: Any

    def engines(self, pool: str = "") -> list[Any]:
        """The engine actors of a pool, or of both."""
        from deployments.pools.engine_actor import engines_of

        return [a for name, a in engines_of(FAKES).items() if name.startswith(f"{FAKES}/{pool}")]

    def replicas(self) -> dict[str, int]:
        """Running replicas by deployment."""
        from ray import serve

        deployments = serve.status().applications[FAKES].deployments
        return {
            name: sum(n for state, n in each.replica_states.items() if state == "RUNNING")
            for name, each in deployments.items()
        }

    def is_settled(self, deployment: str) -> bool:
        """Whether one replica of a deployment runs, and none comes or goes."""
        from ray import serve

        found = serve.status().applications[FAKES].deployments[deployment]
        return bool(found.replica_states == {"RUNNING": 1})

    def held(self) -> tuple[int, int]:
        """Leases and pages in use over all engines; every ledger must balance."""
        import ray
        from ray.exceptions import RayActorError

        leases = pages = 0
        for engine in self.engines():
            try:
                status = ray.get([engine.status.remote(), engine.check_integrity.remote()])[0]
            except RayActorError:
                continue
            leases += status.leases_open
            pages += status.kv_pages_in_use
        return leases, pages


@pytest.fixture(scope="session")
def fakes(ray_cluster: str) -> Fakes:
    """The application with fake engines; the drafter is wrong at every seventh position."""
    from ray import serve

    from deployments.app import compose
    from deployments.config.serve_config import ServeConfig
    from tests.fakes import FakeEngine

    BLOCKS_OPENED.unlink(missing_ok=True)
    load_drafter = functools.partial(FakeEngine, wrong_every=7, opened_by=str(BLOCKS_OPENED))
    config = ServeConfig.model_validate(FAKE_CONFIG)
    serve.run(
        compose(config, FakeEngine, load_drafter),
        name=FAKES,
        route_prefix="/fakes",
        logging_config={"encoding": "JSON", "log_level": "INFO"},
    )
    handle = functools.partial(serve.get_deployment_handle, app_name=FAKES)
    return Fakes(
        f"{ray_cluster}/fakes", handle("Orchestrator"), handle("Target"), handle("Drafter")
    )


FAKE_CONFIG: dict[str, Any] = {
    "target": {
        "engine": {
            "model": "embedded:target",
            "max_context": 1024,
            "kv_cache_tokens": 8192,
            "max_leases": 8,
            "lease_ttl_s": 6,
        },
        "pool": {
            "max_replicas": 2,
            "target_ongoing_requests": 6,
            "upscale_delay_s": 0.5,
            "downscale_delay_s": 2,
            "num_cpus": 0.05,
        },
    },
    "drafter": {
        "engine": {
            "model": "embedded:drafter",
            "max_context": 1024,
            "kv_cache_tokens": 8192,
            "max_leases": 8,
            "lease_ttl_s": 6,
        },
        "pool": {
            "max_replicas": 3,
            "target_ongoing_requests": 3,
            "upscale_delay_s": 0.5,
            "downscale_delay_s": 2,
            "num_cpus": 0.05,
        },
    },
    "retriever": {"retrieval": {"chunk_tokens": 32, "budget_tokens": 128}},
    "orchestrator": {
        "target_wait_s": 20,
        "drafter_wait_s": 20,
        "drafter_hangs_s": 4,  # a busy machine's pauses are no hangs
        "draft_length": "fixed",  # or fakes, whose every step takes the same time, never draft
        "pool": {"num_cpus": 0.05},
    },
    "api": {"model": "fakes", "pool": {"num_cpus": 0.05}},
}


def wait_until(condition: Callable[[], bool], timeout_s: float, every_s: float = 0.02) -> float:
    """Seconds until `condition` holds; fails when it does not in time."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"not within {timeout_s} s"
        time.sleep(every_s)
    return time.monotonic() - began


def question(
    request_id: str,
    *,
    mode: str = "auto",
    text: str = "What does the lighthouse of Varo guard?",
    max_tokens: int | None = 24,
    **fields: Any,
) -> GenerateRequest:
    """A request of the tenant `local`."""
    speculation = SpeculationRequest(mode=mode, **fields.pop("rapid", {}))  # type: ignore[arg-type]
    return GenerateRequest(
        request_id,
        "local",
        (Message("user", text),),
        max_tokens=max_tokens,
        speculation=speculation,
        **fields,
    )
