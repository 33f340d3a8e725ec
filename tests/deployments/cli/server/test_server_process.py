"""The process of a server, from its lock to its end, with a stand-in for Ray's ``serve``."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from deployments.cli.addresses import SERVE_MODULE, address_of
from deployments.cli.server.server_process import CannotStart, ServerProcess, running_pid


def wait(condition: object, timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.02)


class TestServerProcess:
    def test_life(self, config):
        server = ServerProcess.start(config)
        wait(server.is_ready)
        assert server.failure() is None
        assert running_pid() == os.getpid()
        with pytest.raises(CannotStart, match="rapid stop"):
            ServerProcess.start(config)
        server.stop()
        assert "bye" in server.tail()  # it was interrupted, not killed
        server.forget()
        assert running_pid() is None

    def test_it_is_ready_when_every_pool_that_it_shows_has_had_a_replica(self, config):
        first = '{"ready": true, "pools": {"drafter": {"status": "UPDATING", "replicas": 0}}}'
        rests = '{"ready": true, "pools": {"drafter": {"status": "HEALTHY", "replicas": 0}}}'
        states = ["no JSON", '{"ready": false}', first, rests]
        config.write_text(config.read_text() + f"states: {json.dumps(states)}\n")
        server = ServerProcess.start(config)
        wait(server.is_ready)
        assert server._http.get("/ready").text == '{"ready": true}'  # all of `states` came before
        server.stop()
        server.forget()

    def test_a_process_that_ends_says_why(self, config):
        config.write_text(config.read_text() + "fails: out of luck\n")
        server = ServerProcess.start(config)
        wait(server.has_ended)
        assert "out of luck" in server.tail()
        server.forget()

    def test_an_application_that_is_given_up_says_why(self, config):
        config.write_text(config.read_text() + "gives_up: true\n")
        server = ServerProcess.start(config)
        wait(server.failure)
        assert server.failure() == "No memory."
        server.stop()
        server.forget()

    def test_a_taken_port_is_said_at_once(self, config):
        port = int(config.read_text().split()[-1].rstrip("}"))
        with (
            socket.create_server(("127.0.0.1", port)),
            pytest.raises(CannotStart, match="something else"),
        ):
            ServerProcess.start(config)

    def test_a_port_that_another_folders_server_has_is_said_to_be_its(self, config, tmp_path):
        folder = tmp_path / "elsewhere"
        folder.mkdir()
        (folder / "my.yaml").write_text(config.read_text())
        code = "import sys; print(flush=True); sys.stdin.read()"
        command = [sys.executable, "-c", code, SERVE_MODULE, "my.yaml"]
        port = address_of(config)[1]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with (
            subprocess.Popen(command, cwd=folder, **pipes) as other,  # type: ignore[call-overload]
            socket.create_server(("127.0.0.1", port)),
        ):
            assert other.stdout.readline() == b"\n"
            with pytest.raises(CannotStart) as refused:
                ServerProcess.start(config)
            other.stdin.close()
        assert f"a RAPID server that was started from {folder} has " in str(refused.value)
        assert "`rapid stop` there" in str(refused.value)

    def test_so_is_that_of_the_metrics(self, config):
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            pytest.raises(CannotStart, match="end it, or set --metrics-port"),
        ):
            ServerProcess.start(config, listener.getsockname()[1])

    @pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
    def test_an_address_that_this_machine_lacks_is_said_at_once(self, config, host, monkeypatch):
        config.write_text(f"http_options: {{host: {host}, port: 8000}}\n")
        with pytest.raises(CannotStart, match=r"cannot be bound .* set http_options.host"):
            ServerProcess.start(config)
        monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")  # there it may be another machine's
        server = ServerProcess.start(config)
        server.stop()
        server.forget()

    def test_a_part_of_ray_that_dies_is_noticed_and_what_it_leaves_is_ended(self, config):
        raylet = config.parent / "bin" / "raylet"
        raylet.symlink_to(Path(sys.executable).resolve())
        config.write_text(config.read_text() + f"raylet: {raylet}\n")
        server = ServerProcess.start(config)

        def workers():
            return re.findall(r"^\d+$", server.tail(), flags=re.MULTILINE)

        wait(workers)
        assert server.find_lost_part() is None
        (part,) = server._parts.values()
        part.kill()
        wait(server.find_lost_part)
        assert server.find_lost_part() == "raylet"
        assert not server.has_ended()
        (worker,) = map(int, workers())
        assert psutil.pid_exists(worker)
        server.stop()
        assert not is_alive(worker)
        server.forget()

    def test_a_ray_that_was_late_is_started_again(self, config):
        config.write_text(config.read_text() + "late: 1\n")
        server = ServerProcess.start(config)
        wait(server.has_ended)
        said = "Ray did not start: The current node timed out during startup."
        assert server.why_no_ray() == said
        server.start_again()
        assert server.why_no_ray() is None
        wait(server.is_ready)
        assert said in server.tail()  # the log goes on
        server.stop()
        server.forget()


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
