"""The private parts of Ray and Serve are as this application takes them, one test for each.

One that fails after an upgrade of Ray names what to adapt in `cluster/serve_internals.py`, or in
the module that its docstring names.
"""

from __future__ import annotations

import ast
import inspect
import logging
import re
from logging.handlers import MemoryHandler, RotatingFileHandler
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from ray._common.usage import usage_constants
from ray._private import ray_constants
from ray.actor import ActorClass
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
from ray.serve._private import (
    application_state,
    client,
    config,
    constants,
    deploy_utils,
    logging_utils,
    proxy,
    replica,
    replica_result,
    tracing_utils,
)
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.handle_options import DynamicHandleOptions
from ray.serve._private.request_router.request_router import RequestRouter as Base
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import RequestRouter

from cluster import serve_internals
from cluster.affinity import AffinityRouter
from cluster.leases import LeasingReplica
from deployments.cli.server.server_process import LOCAL_RAY
from deployments.proxy.server_limits import IngressRouter
from tests.house_budget import PACKAGES, ROOT, measure

_PRIVATE = re.compile(
    r"\b_(actor_id|deployment_id|replicas_list|deployment_config|by_reference|check_exists"
    r"|start_http_server_task|get_global_client)\b|__ray_\w+__"
)


def source_of(part: Any) -> str:
    return inspect.getsource(part)


def test_no_other_module_has_private_parts_of_ray() -> None:
    assert measure()["tree"]["private_imports_of_ray"] == 0
    found = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if _PRIVATE.search(path.read_text())
    }
    assert found == {"cluster/serve_internals.py"}


def test_each_part_has_a_test() -> None:
    """Every name of the module stands in a test here, or in the test of a module that it names."""
    tree = ast.parse(source_of(inspect.getmodule(source_of)))
    tested = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert set(serve_internals.__all__) <= tested


def test_serve_sends_the_deployments_version_and_not_the_applications() -> None:
    deployment = serve_internals.pin_version(
        serve.deployment(LeasingReplica).options(name="Target", max_ongoing_requests=7), "its own"
    )
    bound = deployment.options(name="Target", user_config={"live": 1})  # as Serve's builder does
    sent = deploy_utils.get_deploy_args(
        "Target",
        bound._replica_config,
        deployment_config=bound._deployment_config,
        version="the application's",
    )
    found = config.DeploymentConfig.from_proto_bytes(sent["deployment_config_proto_bytes"])
    assert found.version == "its own"
    assert (found.max_ongoing_requests, found.user_config) == (7, {"live": 1})


def test_two_deployments_of_one_class_have_versions_of_their_own() -> None:
    one = serve.deployment(LeasingReplica)
    pinned = [serve_internals.pin_version(one, version) for version in "ab"]
    sent = [each._deployment_config.to_proto_bytes() for each in pinned]
    assert [config.DeploymentConfig.from_proto_bytes(each).version for each in sent] == ["a", "b"]
    assert one._deployment_config.version is None


def test_an_actor_has_its_id() -> None:
    assert isinstance(inspect.getattr_static(ray.actor.ActorHandle, "_actor_id"), property)
    assert "self._ray_actor_id" in source_of(ray.actor.ActorHandle._actor_id.fget)
    actor: Any = SimpleNamespace(_actor_id=ray.ActorID.nil())
    assert serve_internals.actor_id(actor) == ray.ActorID.nil().hex()


@pytest.mark.parametrize("by_reference", [True, False])
def test_a_handle_takes_the_transport(by_reference: bool) -> None:
    option = serve_internals.transport(by_reference=by_reference)
    inspect.signature(DeploymentHandle.options).bind(None, **option)
    options = DynamicHandleOptions().copy_and_update(**option)
    assert options._by_reference is by_reference


def test_a_handle_can_be_had_before_its_application_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    inspect.signature(serve.get_deployment_handle).bind("Orchestrator", "next", _check_exists=False)
    asked: dict[str, Any] = {}
    monkeypatch.setattr(serve, "get_deployment_handle", lambda *_, **options: asked.update(options))
    serve_internals.handle_before_start("Orchestrator", "next")
    assert asked == {"_check_exists": False}


def test_serves_client_deploys_files_and_shuts_down_in_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inspect.signature(client.ServeControllerClient.deploy_apps).bind(None, "a schema")
    inspect.signature(client.ServeControllerClient.shutdown).bind(None, timeout_s=5.0)
    inspect.signature(serve.context._get_global_client).bind()
    monkeypatch.setattr(serve_internals, "_get_global_client", lambda: "the client")
    assert serve_internals.serve_client() == "the client"


def test_an_unaccepted_stream_is_reported_in_words() -> None:
    """Serve gives nothing else."""
    source = source_of(replica_result.gRPCReplicaResult.get_rejection_response)
    assert 'raise RuntimeError(f"Unexpected error ({code}): {details}.")' in source
    told = RuntimeError("Unexpected error (StatusCode.CANCELLED): closing.")
    assert serve_internals.is_unaccepted_stream(told)
    assert not serve_internals.is_unaccepted_stream(RuntimeError("a bug"))
    assert not serve_internals.is_unaccepted_stream(ValueError(str(told)))


@pytest.mark.parametrize(
    "message",
    [
        "Failed to update the deployments {failed_deployments}.",
        "Deploying app '{self._name}' failed with exception:",
        "Runtime env setup for app '{self._name}' failed:",
        "Unexpected error occurred while deploying application ",
        "Unexpected error occurred while applying config for ",
    ],
)
def test_the_controllers_log_says_why_an_application_is_given_up(message: str) -> None:
    assert message in source_of(application_state)
    line = f"(ServeController pid=7) WARNING 2026-11-24 10:00:00,000 controller 7 -- {message}"
    log = f"INFO -- Starting\n{line}\n"
    assert serve_internals.find_reason_given_up(log) == message
    assert serve_internals.find_reason_given_up("INFO -- Deploying new version") is None


def test_the_controller_writes_two_dashes_before_a_message() -> None:
    assert constants.SERVE_LOG_RECORD_FORMAT[constants.SERVE_LOG_MESSAGE] == "-- %(message)s"


@pytest.mark.parametrize(
    ("namespace", "name", "found"),
    [
        ("serve", "SERVE_REPLICA::rapid#Target#abc", ("target", "abc")),
        ("serve", "SERVE_REPLICA::rapid-2#Target#abc", ("", "")),
        ("other", "SERVE_REPLICA::rapid#Target#abc", ("", "")),
        ("serve", "SERVE_CONTROLLER_ACTOR", ("", "")),
    ],
)
def test_replicas_are_known_by_name(namespace: str, name: str, found: tuple[str, str]) -> None:
    assert serve_internals.replica_of("rapid", namespace, name) == found


def test_serve_names_its_replicas_so() -> None:
    named = ReplicaID("abc", DeploymentID("Target", "rapid")).to_full_id_str()
    assert serve_internals.replica_of("rapid", constants.SERVE_NAMESPACE, named) == (
        "target",
        "abc",
    )


def test_serves_actors_have_these_classes() -> None:
    replicas, proxies = serve_internals.SERVE_ACTORS
    assert DeploymentID("Target", "rapid").to_replica_actor_class_name().startswith(replicas)
    assert proxy.ProxyActor.__ray_metadata__.class_name.startswith(proxies)


def test_an_actor_of_any_class_gives_a_sign_of_life() -> None:
    assert "__ray_ready__" in source_of(ActorClass) + source_of(ray.actor)
    sign = SimpleNamespace(future=lambda: "a future")
    actor: Any = SimpleNamespace(__ray_ready__=SimpleNamespace(remote=lambda: sign))
    assert serve_internals.request_sign(actor) == "a future"


def test_an_actor_calls_a_function_with_its_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "__ray_call__" in source_of(ray.actor)
    called: list[Any] = []
    me = SimpleNamespace(__ray_call__=SimpleNamespace(remote=called.append))
    context = SimpleNamespace(get_actor_id=lambda: None, current_actor=me)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    serve_internals.call_in_actor(print)
    assert called == []  # this process is no actor
    context.get_actor_id = lambda: "0a1b"
    serve_internals.call_in_actor(print)
    assert called == [print]


def test_every_replica_of_every_application_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["SERVE_REPLICA::one#Target#a", "SERVE_REPLICA::two#Ingress#b", "SERVE_CONTROLLER"]
    listed = [{"name": name, "namespace": "serve"} for name in names]
    monkeypatch.setattr(ray.util, "list_named_actors", lambda all_namespaces: listed)
    asked: list[Any] = []
    me = SimpleNamespace(__ray_call__=SimpleNamespace(remote=lambda *call: asked.append(call)))
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: me)
    found = serve_internals.replicas()
    assert set(found) == {("one", "target", "a"), ("two", "ingress", "b")}
    serve_internals.ask_in_actor(found["one", "target", "a"], print, 1)
    assert asked == [(print, 1)]


def test_a_proxy_keeps_its_server_where_it_is_looked_for() -> None:
    assert "self._start_http_server_task = " in source_of(proxy)
    used: list[Any] = []
    starting = SimpleNamespace(
        add_done_callback=lambda do: do(SimpleNamespace(result=lambda: ("a task", "a server")))
    )
    serve_internals.on_http_server(SimpleNamespace(_start_http_server_task=starting), used.append)
    serve_internals.on_http_server(object(), used.append)
    assert used == ["a server"]


def test_a_replica_starts_its_server_after_its_class() -> None:
    """`deployments/proxy/server_limits.py` sets the server's default from the class."""
    source = source_of(replica)
    initialize = source[source.index("async def initialize(") :]
    assert initialize.index("initialize_callable()") < initialize.index("_on_initialized()")


def test_serve_says_whether_haproxy_or_replicas_serve_http() -> None:
    assert serve_internals.RAY_SERVE_ENABLE_HA_PROXY is constants.RAY_SERVE_ENABLE_HA_PROXY
    direct = constants.RAY_SERVE_ENABLE_DIRECT_INGRESS
    assert serve_internals.RAY_SERVE_ENABLE_DIRECT_INGRESS is direct


def test_a_router_knows_its_pool_and_the_replicas_that_run() -> None:
    one = object.__new__(AffinityRouter)
    assert isinstance(one, serve_internals.PoolRequestRouter)
    one._deployment_id, one._replicas_list = "Target", ["a", "b"]
    assert (one.pool, one.running) == ("Target", ["a", "b"])
    source = source_of(Base)
    assert "self._deployment_id = deployment_id" in source
    assert "self._replicas_list = list(" in source


def test_serve_calls_what_the_routers_override() -> None:
    """The API of request routers is alpha: `cluster/affinity.py`, `server_limits.py`."""
    assert issubclass(AffinityRouter, RequestRouter)
    assert issubclass(IngressRouter, serve_internals.PowerOfTwoChoicesRequestRouter)
    for name in (
        "initialize_state",
        "update_replicas",
        "choose_replicas",
        "on_request_routed",
        "on_request_completed",
    ):
        ours, theirs = getattr(AffinityRouter, name), getattr(RequestRouter, name)
        if name != "initialize_state":  # which takes what the configuration gives
            assert list(inspect.signature(ours).parameters) == list(
                inspect.signature(theirs).parameters
            )
    assert isinstance(inspect.getattr_static(Base, "replica_queue_len_cache"), property)


def test_serve_asks_replicas_for_their_reports() -> None:
    """The hooks of `cluster/leases.py` and `cluster/autoscaling.py`, which are alpha."""
    assert LeasingReplica.record_routing_stats.__name__ == constants.REQUEST_ROUTING_STATS_METHOD
    assert LeasingReplica.record_autoscaling_stats.__name__ in source_of(replica)


@pytest.fixture
def logger(tmp_path: Any) -> Any:
    one = logging.Logger("a replica's", logging.WARNING)
    file = RotatingFileHandler(tmp_path / "replica.log")
    one.addHandler(MemoryHandler(1, target=file))
    yield one
    file.close()


@pytest.mark.parametrize("encoding", ["JSON", "TEXT"])
def test_the_settings_of_serves_logger_are_read_from_its_handlers(
    logger: Any, encoding: str, tmp_path: Any
) -> None:
    """That Serve makes such handlers: `tests/deployments/test_logs.py`."""
    if encoding == "JSON":
        logger.handlers[0].target.setFormatter(serve_internals.JSONFormatter())
    found = serve_internals.read_log_settings(logger)
    assert (found.encoding, found.log_level, found.logs_dir) == (encoding, "WARNING", str(tmp_path))


def test_an_engine_logs_and_traces_as_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    for real in (logging_utils.configure_component_logger, tracing_utils.setup_tracing):

        def take(real: Any = real, **options: Any) -> None:
            inspect.signature(real).bind(**options)
            given.append(options)

        monkeypatch.setattr(serve_internals, real.__name__, take)
    settings = serve_internals.LoggingConfig()
    serve_internals.configure_engine_log("rapid_Target", "abc_engine", settings)
    assert [each["component_name"] for each in given] == ["rapid_Target"] * 2
    assert given[0]["logging_config"] is settings


def test_ray_reads_the_variables_of_a_local_server() -> None:
    """Those of `deployments/cli/server/server_process.py`."""
    read = source_of(constants) + source_of(ray_constants) + source_of(usage_constants)
    assert [name for name in LOCAL_RAY if name not in read] == []


def test_the_dashboard_takes_what_rapid_apply_sends() -> None:
    """`deployments/cli/serving.py`."""
    inspect.signature(ServeSubmissionClient.__init__).bind(None, "http://address", headers={})
    inspect.signature(ServeSubmissionClient.get_serve_details).bind(None)
    inspect.signature(ServeSubmissionClient.deploy_applications).bind(None, {})


def test_serve_builds_an_application_by_its_deployments() -> None:
    """What `pin_version` changes is what Serve sends: the configuration of each deployment."""
    assert "deployment_config=deployment._deployment_config" in source_of(application_state)
