"""The process that runs Serve: what it starts it with, and how it ends."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.serve.schema import ReplicaState

from deployments.cli.server import run_serve
from deployments.cli.server.server_state import RAY_DID_NOT_START, ServerState, read_state

ROOT = Path(__file__).parents[4]


class Client:
    """Serve's client; the process is told to end as soon as the target is ready."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number
        self.num_looks = 0
        self.names: list[str] = []
        self.timeout_s: float | None = None

    def deploy_apps(self, settings):
        self.names = [each.name for each in settings.applications]

    def status(self):
        self.num_looks += 1
        if self.num_looks == 1:
            raise ConnectionError  # the controller is busy
        if self.num_looks == 4:
            signal.raise_signal(self.number)
        running = {ReplicaState.RUNNING: self.num_looks - 2}
        deployments = {
            "Target": SimpleNamespace(replica_states=running),
            "Drafter": SimpleNamespace(replica_states={ReplicaState.STARTING: 1}),
        }
        return SimpleNamespace(applications={"rapid": SimpleNamespace(deployments=deployments)})

    def shutdown(self, timeout_s):
        self.timeout_s = timeout_s


@pytest.fixture
def handlers():
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "address", "timeout_s", "dashboard"),
    [
        (signal.SIGINT, "local", 5.0, "http://127.0.0.1:8267"),
        (signal.SIGTERM, "10.0.0.1:6379", 30.0, ""),  # of another machine, perhaps
    ],
)
def test_a_file_is_served_until_the_process_is_told_to_stop(
    number, address, timeout_s, dashboard, handlers, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_serve, "_EVERY_S", 0.0)
    client, started = Client(number), {}
    monkeypatch.setenv("RAY_ADDRESS", address)
    session = {"session_dir": "/tmp/ray/session_1"}
    found = SimpleNamespace(dashboard_url="127.0.0.1:8267", address_info=session)
    asked: dict[str, object] = {}
    monkeypatch.setattr(run_serve.ray, "init", lambda **options: asked.update(options) or found)
    monkeypatch.setattr(run_serve, "metrics_of_nodes", lambda: ["http://127.0.0.1:9100/metrics"])
    monkeypatch.setattr(run_serve.serve, "status", client.status)
    monkeypatch.setattr(run_serve.serve, "start", lambda **options: started.update(options))
    monkeypatch.setattr(run_serve, "serve_client", lambda: client)
    run_serve.run(ROOT / "serve_config.yaml", 9100)
    assert asked == {"namespace": "serve", "_metrics_export_port": 9100}
    assert client.names == ["rapid"]
    assert client.timeout_s == timeout_s
    assert started["http_options"]["host"] == "127.0.0.1"
    logs = started["logging_config"]
    assert (logs.encoding, logs.log_level) == ("JSON", "WARNING")
    assert read_state() == ServerState(
        dashboard,
        {"target": "ready", "drafter": "starting"},
        metrics=["http://127.0.0.1:9100/metrics"],
        session="/tmp/ray/session_1",
        url="http://127.0.0.1:8000",
    )


def test_a_ray_that_does_not_start_is_one_sentence_and_a_status_of_its_own(monkeypatch, capsys):
    def late(namespace):
        raise Exception("The current node timed out during startup. This could happen ...")

    monkeypatch.setattr(run_serve.ray, "init", late)
    with pytest.raises(SystemExit) as ended:
        run_serve.run(ROOT / "serve_config.yaml")
    assert ended.value.code == RAY_DID_NOT_START
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("Ray did not start: The current node timed out during startup.")
