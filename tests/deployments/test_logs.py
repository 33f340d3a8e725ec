"""Every process's lines come out as Serve's do: as JSON, with the request that they are about."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from collections.abc import Iterator
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import yaml
from ray.serve._private.common import ServeComponentType
from ray.serve._private.logging_utils import configure_component_logger
from ray.serve.schema import LoggingConfig

from cluster.serve_internals import read_log_settings
from deployments import logs
from deployments.api.http import access_log
from deployments.orchestrator.deployment import Orchestrator
from library.accounts.callers import TENANT, Caller
from rapid.chat_messages import DocumentRef
from tests.ray_cluster import Fakes, wait_until

SERVE = logging.getLogger("ray.serve")
ROOT = Path(__file__).parents[2]
TRACE, OTHER_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736", "5cf92f3577b34da6a3ce929d0e0e4736"


def shipped_configurations() -> list[Path]:
    return [ROOT / "serve_config.yaml", *sorted((ROOT / "cluster" / "configs").glob("*.yaml"))]


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[Any]:
    """Configure Serve's logger as in a replica; return the function that reads its lines."""
    loggers = [SERVE, *map(logging.getLogger, logs.PACKAGES)]
    before = [(each, each.level, each.handlers[:], each.propagate) for each in loggers]
    printed = (sys.stdout, sys.stderr)
    opened: list[logging.Handler] = []

    def configure(level: str, encoding: str = "JSON", *, has_access_log: bool = True) -> Any:
        configure_component_logger(
            component_name="rapid_Target",
            component_id="abc_engine",
            component_type=ServeComponentType.REPLICA,
            logging_config=LoggingConfig(
                encoding=encoding,
                log_level=level,
                logs_dir=str(tmp_path),
                enable_access_log=has_access_log,
            ),
            max_bytes=2**20,
            backup_count=1,
        )
        opened.extend(each.target for each in SERVE.handlers if isinstance(each, MemoryHandler))
        return lambda: [
            line for path in tmp_path.glob("*.log") for line in path.read_text().splitlines()
        ]

    yield configure
    for file in opened:
        file.close()
    for each, level, handlers, propagate in before:
        each.setLevel(level)
        each.handlers, each.propagate = handlers, propagate
    sys.stdout, sys.stderr = printed


def test_a_line_of_the_application_has_what_serves_lines_have(log_file: Any) -> None:
    lines = log_file("INFO")
    logs._pass_on()
    logging.getLogger("rapid.answering.request").warning("request %s: new leases", "r1")
    logging.getLogger("deployments.pools").info("read", extra=logs.about_lease("a/b/target-f0.1"))
    logging.getLogger("rapid.answering").debug("not at this level")
    warned, informed = map(json.loads, lines())
    assert warned["levelname"] == "WARNING"
    assert warned["message"] == "request r1: new leases"
    assert warned["logger"] == "rapid.answering.request"
    assert (warned["deployment"], warned["replica"]) == ("rapid_Target", "abc_engine")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}", warned["asctime"])
    assert (informed["levelname"], informed["request_id"]) == ("INFO", "a/b")


def test_the_level_may_change_while_a_replica_runs(log_file: Any) -> None:
    lines = log_file("INFO")
    logs._pass_on()
    log_file("ERROR")
    logging.getLogger("cluster.leases").warning("below the level")
    assert not lines()


@pytest.mark.parametrize("is_wanted", [True, False])
def test_each_request_has_its_line_at_any_level(log_file: Any, is_wanted: bool) -> None:
    lines = log_file("ERROR", has_access_log=is_wanted)
    logs._pass_on()
    caller = Caller("acme", "key_1", frozenset())
    with access_log.AccessLog(lambda: 0.0).request("r1", caller, "m"):
        logging.getLogger("deployments.api.ingress").info("not at this level")
    found = [json.loads(line) for line in lines()]
    assert len(found) == is_wanted
    for line in found:
        assert (line["request_id"], line["tenant"], line["outcome"]) == ("r1", "acme", "left")
        assert line["logger"] == "deployments.api.http.access_log"
        assert "serve_access_log" not in line


def test_a_line_names_the_tenant_whose_request_is_served(log_file: Any) -> None:
    lines = log_file("INFO")
    logs._pass_on()
    token = TENANT.set("acme")
    logging.getLogger("deployments.orchestrator").info("a request")
    logging.getLogger("deployments.orchestrator").info("another's", extra={"tenant": "guest"})
    TENANT.reset(token)
    logging.getLogger("deployments.orchestrator").info("nobody's")
    assert [json.loads(each).get("tenant") for each in lines()] == ["acme", "guest", None]


class NamedLines:
    """Retrieval that answers with the tenant whom its log lines would name."""

    async def search(self, *_: Any) -> str | None:
        return TENANT.get()

    list_chunks = search


async def test_a_search_and_a_list_of_passages_name_their_tenant_too() -> None:
    orchestrator: Any = Orchestrator.__new__(Orchestrator)
    orchestrator._access, orchestrator._shared = None, NamedLines()
    assert await orchestrator.search("acme", [], "Who?", 1) == "acme"
    assert await orchestrator.list_chunks("guest", DocumentRef("a", "digest", 1), 0, 1) == "guest"


@pytest.mark.parametrize("encoding", ["JSON", "TEXT"])
def test_an_engine_is_told_how_its_replica_logs(
    log_file: Any, encoding: str, tmp_path: Path
) -> None:
    log_file("WARNING", encoding)
    told = read_log_settings(SERVE)
    assert told == LoggingConfig(encoding=encoding, log_level="WARNING", logs_dir=str(tmp_path))


def test_a_process_that_is_no_replica_keeps_its_logging() -> None:
    before = logging.getLogger("rapid").handlers[:]
    logs.log_with_serve()
    assert logging.getLogger("rapid").handlers == before


@pytest.mark.parametrize("path", shipped_configurations(), ids=lambda path: path.name)
def test_a_shipped_configuration_logs_json(path: Path) -> None:
    assert yaml.safe_load(path.read_text())["logging_config"]["encoding"] == "JSON"


@pytest.mark.parametrize(
    ("given", "level"),
    [(None, "WARNING"), ("DEBUG", "WARNING"), ("INFO", "WARNING"), ("ERROR", "ERROR")],
)
def test_serve_does_not_write_down_what_it_builds_from(given, level):
    config = LoggingConfig(encoding="JSON", log_level=given, logs_dir="/logs") if given else None
    found = logs.system_logging(config)
    assert found.log_level == level
    if config is not None:
        assert found == config.model_copy(update={"log_level": level})
        assert config.log_level == given


def test_an_edit_leaves_serves_own_processes_quiet() -> None:
    own = {"name": "b", "logging_config": {"log_level": "ERROR"}}
    given = {"encoding": "JSON", "log_level": "INFO"}
    content = {"logging_config": given, "applications": [{"name": "a"}, own]}
    assert logs.with_system_logging(content) == {
        "logging_config": given | {"log_level": "WARNING"},
        "applications": [{"name": "a", "logging_config": given}, own],
    }
    assert logs.with_system_logging({"applications": [own]}) == {
        "logging_config": {"log_level": "WARNING"},
        "applications": [own],
    }


def serve_logs() -> Path:
    return Path(ray._private.worker._global_node.get_logs_dir_path()) / "serve"


def lines_about(request_id: str) -> list[dict[str, Any]]:
    """The lines of all replicas and engines with this request's id."""
    found = []
    for path in serve_logs().glob("replica_*.log"):
        for line in path.read_text().splitlines():
            if request_id in line:
                found.append(json.loads(line))
    return found


def spans_of(trace_id: str) -> list[dict[str, Any]]:
    """The spans of a trace that have been written so far, by any process."""
    found = []
    decoder = json.JSONDecoder()
    for path in (serve_logs() / "spans").glob("*"):
        text, at = path.read_text(), 0
        while at < len(text.rstrip()):
            try:
                each, at = decoder.raw_decode(text, at)
            except json.JSONDecodeError:  # half written
                break
            at += len(text[at:]) - len(text[at:].lstrip())
            if each["context"]["trace_id"] == f"0x{trace_id}":
                found.append(each)
    return found


@pytest.mark.ray
async def test_a_request_is_followed_through_every_process(fakes: Fakes) -> None:
    """Its target dies; the lines and the spans tell of it under the id and trace of the caller."""
    body = {
        "model": "fakes",
        "messages": [{"role": "user", "content": "What does the lighthouse of Varo guard?"}],
        "seed": 60_005,
        "max_tokens": 60,
        "stream": True,
        "rapid": {
            "mode": "lossless",
            "documents": [{"name": "atlas", "text": "The lighthouse of Varo is white.\n\n" * 40}],
        },
    }
    headers = {"x-request-id": "caller/7", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    num_chunks = 0
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream(
            "POST", f"{fakes.url}/v1/chat/completions", json=body, headers=headers
        ) as reply,
    ):
        assert reply.headers["x-request-id"] == "caller/7"
        async for line in reply.aiter_lines():
            num_chunks += line.startswith("data: ")
            if num_chunks == 4:
                num_chunks += 1
                for engine in await asyncio.to_thread(fakes.engines, "Target"):
                    ray.kill(engine)
    await asyncio.to_thread(check_lines)
    await asyncio.to_thread(check_spans)


def check_lines() -> None:
    def has_all() -> bool:  # the last lines are written once the client has its answer
        found = lines_about("caller/7")
        return any(each.get("logger", "").endswith("access_log") for each in found)

    wait_until(has_all, 20)
    about = lines_about("caller/7")
    assert {each["request_id"] for each in about} == {"caller/7"}
    assert not [each for each in about if "lighthouse" in str(each).lower()]
    assert {each.get("tenant") for each in about if "logger" in each} == {"local"}  # not Serve's
    (warned,) = [each for each in about if ": new leases: " in each["message"]]
    assert warned["levelname"] == "WARNING"
    assert warned["logger"] == "rapid.answering.run"
    assert (warned["deployment"], warned["application"]) == ("fakes_Orchestrator", "fakes")
    deployments = {each["deployment"] for each in about}
    assert deployments == {
        f"fakes_{each}" for each in ("Ingress", "Orchestrator", "Retriever", "Target", "Drafter")
    }
    (line,) = [each for each in about if each.get("logger", "").endswith("access_log")]
    assert line["deployment"] == "fakes_Ingress"
    assert (line["outcome"], line["mode"], line["completion_tokens"]) == ("ok", "lossless", 60)
    read = [each for each in about if "prompt tokens" in each["message"]]
    engines = [each for each in read if each["replica"].endswith("_engine")]
    assert {each["deployment"] for each in engines} == {"fakes_Target", "fakes_Drafter"}
    assert engines == read


def check_spans() -> None:
    ours = {"tokenize", "retrieval", "lease", "prefill", "round", "failover"}
    calls = ("Orchestrator generate", "Retriever retrieve", "Drafter lease")
    expected = ours | {f"replica_handle_request {call}" for call in calls}

    def are_there() -> bool:
        return expected <= {each["name"] for each in spans_of(TRACE)}

    wait_until(are_there, 30, every_s=0.5)
    spans = spans_of(TRACE)
    ids = {each["context"]["span_id"] for each in spans}
    for each in spans:
        assert "lighthouse" not in str(each).lower()
        assert each["name"] not in ours or each["parent_id"] in ids
    served = [each for each in spans if each["name"].endswith("Orchestrator generate")]
    assert "lossless" in [each["attributes"].get("rapid.mode") for each in served]


@pytest.mark.ray
async def test_engines_record_their_calls_in_their_callers_trace(application: str) -> None:
    """Only they know how long a call waited for its turn and how long it was computed."""
    body = {
        "model": "rapid-embedded",
        "messages": [{"role": "user", "content": "What is the banner of Tezawe?"}],
        "seed": 5,
        "max_tokens": 8,
        "rapid": {
            "mode": "fused",
            "documents": [{"name": "atlas", "text": "The banner of Tezawe is blue.\n\n" * 40}],
        },
    }
    headers = {"traceparent": f"00-{OTHER_TRACE}-00f067aa0ba902b7-01"}
    async with httpx.AsyncClient(timeout=120) as client:
        reply = await client.post(f"{application}/v1/chat/completions", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    await asyncio.to_thread(check_calls)


def check_calls() -> None:
    def calls() -> dict[tuple[str, str], dict[str, Any]]:
        spans = [each for each in spans_of(OTHER_TRACE) if each["name"].startswith("engine.")]
        return {(each["attributes"]["rapid.role"], each["name"]): each for each in spans}

    expected = {("target", "engine.prefill"), ("drafter", "engine.prefill")}
    expected |= {("drafter", "engine.draft")}

    def are_whole() -> bool:  # every process writes its spans when it gets round to it
        parents = {each["parent_id"] for each in calls().values()}
        ids = {each["context"]["span_id"] for each in spans_of(OTHER_TRACE)}
        return expected <= calls().keys() and parents <= ids

    wait_until(are_whole, 60, every_s=0.5)
    for each in calls().values():
        assert each["attributes"]["rapid.waited_ms"] >= 0
        assert "Tezawe" not in str(each)
