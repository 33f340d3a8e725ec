"""The process that runs Serve: what it starts it with, and how it ends."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from deployments.cli import run_serve

ROOT = Path(__file__).parents[3]


class Client:
    """Serve's client; the process is told to end as soon as the applications are deployed."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number
        self.names: list[str] = []
        self.timeout_s: float | None = None

    def deploy_apps(self, settings):
        self.names = [each.name for each in settings.applications]
        signal.raise_signal(self.number)

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
    ("number", "address", "timeout_s"),
    [(signal.SIGINT, "local", 5.0), (signal.SIGTERM, "10.0.0.1:6379", 30.0)],
)
def test_a_file_is_served_until_the_process_is_told_to_stop(
    number, address, timeout_s, handlers, monkeypatch
):
    client, started = Client(number), {}
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(run_serve.ray, "init", lambda namespace: None)
    monkeypatch.setattr(run_serve.serve, "start", lambda **options: started.update(options))
    monkeypatch.setattr(run_serve, "_get_global_client", lambda: client)
    run_serve.run(ROOT / "serve_config.yaml")
    assert client.names == ["rapid"]
    assert client.timeout_s == timeout_s
    assert started["http_options"]["host"] == "127.0.0.1"
    logs = started["logging_config"]
    assert (logs.encoding, logs.log_level) == ("JSON", "WARNING")
