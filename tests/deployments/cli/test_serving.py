"""`rapid check-config`, `serve`, `apply` and `stop`, with stand-ins for Ray's ``serve``."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from ray.exceptions import AuthenticationError

from deployments.cli.server.server_process import ServerProcess, running_pid, stop_running
from deployments.cli.server.server_state import ServerState
from tests.deployments.cli.command import rapid
from tests.rapid.tiny_stored import publish

ROOT = Path(__file__).parents[3]


class TestCheckConfig:
    def test_the_default(self):
        result = rapid("check-config", str(ROOT / "serve_config.yaml"))
        assert result.exit_code == 0
        assert "is fine" in result.stdout

    def test_it_says_what_drafts(self, tmp_path):
        file = yaml.safe_load((ROOT / "serve_config.yaml").read_text(encoding="utf-8"))
        args = file["applications"][0]["args"]
        del args["retriever"]
        path = tmp_path / "config.yaml"
        for drafter, named in (("prompt_lookup", "prompt lookup"), ("target", "embedded:target")):
            args["drafter"] = drafter
            path.write_text(yaml.safe_dump(file), encoding="utf-8")
            assert f"{named} drafts" in rapid("check-config", str(path)).stdout.replace("\n", " ")

    def test_it_names_every_model(self, tmp_path):
        file = yaml.safe_load((ROOT / "serve_config.yaml").read_text(encoding="utf-8"))
        args = file["applications"][0]["args"]
        del args["api"]["model"]
        target, drafter = args.pop("target"), args.pop("drafter")
        args["engine_pools"] = {"quick": drafter}
        args["models"] = {
            "large": {"target": target, "drafter": "quick"},
            "lookup": {"target": "quick", "drafter": "prompt_lookup"},
        }
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(file), encoding="utf-8")
        said = " ".join(rapid("check-config", str(path)).stdout.split())
        assert "embedded:target answers as 'large', embedded:drafter drafts" in said
        assert "embedded:drafter answers as 'lookup', prompt lookup drafts" in said

    def test_it_says_how_a_published_checkpoint_is_stored(self, tmp_path):
        engine, _ = publish(tmp_path, "awq")
        (Path(engine.model) / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
        file = yaml.safe_load((ROOT / "serve_config.yaml").read_text(encoding="utf-8"))
        args = file["applications"][0]["args"]
        del args["retriever"]
        args["target"]["engine"] |= {
            "model": engine.model, "max_context": 256, "kv_cache_tokens": 4096
        }  # fmt: skip
        args["drafter"] = "prompt_lookup"
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(file), encoding="utf-8")
        said = " ".join(rapid("check-config", str(path)).stdout.split())
        assert "stored (awq, 4 bits in groups of 128) answers as" in said

    def test_a_mistake_is_one_readable_message(self, tmp_path):
        text = (ROOT / "serve_config.yaml").read_text(encoding="utf-8")
        path = tmp_path / "config.yaml"
        path.write_text(text.replace("max_draft:", "max_drafts:"), encoding="utf-8")
        for command in ("check-config", "serve"):
            result = rapid(command, str(path))
            assert result.exit_code == 2
            assert "max_drafts" in result.stderr
            assert "Traceback" not in result.output

    def test_engines_on_several_nodes_are_for_a_cluster(self, tmp_path):
        file = yaml.safe_load((ROOT / "cluster/configs/two-processes.yaml").read_text())
        path = tmp_path / "config.yaml"

        def result(command, nodes):
            file["applications"][0]["args"]["target"]["pool"]["nodes"] = nodes
            path.write_text(yaml.safe_dump(file), encoding="utf-8")
            return rapid(command, str(path))

        assert result("check-config", 2).exit_code == 0
        told = result("check-config", 3).stderr.replace("\n", " ")
        assert "nodes (3) have an equal part of an engine's processes each" in told
        assert "needs a Ray of as many nodes" in result("serve", 2).stderr.replace("\n", " ")


def serving(config: Path, *options: str) -> subprocess.Popen[str]:
    """`rapid serve` in a process of its own, whose shell has it ignore Ctrl-C."""
    code = (
        "import sys; from pathlib import Path; from types import SimpleNamespace as N;"
        "import typer; from deployments.cli import serving;"
        "from deployments.cli.server import server_process;"
        f"server_process.SERVE_COMMAND = ({str(config.parent / 'bin' / 'serve')!r},);"
        "server_process._REST_TIMEOUT_S = 0.1;"
        "model = N(name='m', config=N(is_embedded=False));"
        "found = N(served=[model], parts={}, api=N(console=True));"
        "serving._examine = lambda path, _: (path, found, '');"
        f"app = typer.Typer(); app.command()(serving.serve); app({['config.yaml', *options]!r})"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=config.parent,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )


class TestServe:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_watched_until_it_is_told_to_stop(self, config, number):
        served = serving(config)
        assert served.stderr is not None
        lines = iter(served.stderr.readline, "")
        assert any("ready" in line for line in lines)
        assert running_pid() == served.pid
        if number == signal.SIGTERM:
            assert stop_running(served.pid, 20)
        else:
            served.send_signal(number)
        assert served.wait(20) == 0
        assert "bye" in (config.parent / ".run" / "serve.log").read_text()
        served.stderr.close()

    def test_it_ends_when_its_raylet_dies(self, config):
        raylet = config.parent / "bin" / "raylet"
        raylet.symlink_to(Path(sys.executable).resolve())
        config.write_text(config.read_text() + f"raylet: {raylet}\n")
        served = serving(config)
        assert served.stderr is not None
        assert any("ready" in line for line in iter(served.stderr.readline, ""))
        below = psutil.Process(served.pid).children(recursive=True)
        (part,) = [each for each in below if each.name() == "raylet"]
        part.kill()
        told = served.stderr.read()
        assert served.wait(60) == 1
        assert "error: Ray is lost, as its raylet has died" in told
        served.stderr.close()

    @pytest.mark.parametrize(("late", "status"), [(2, 0), (3, 1)])
    def test_a_ray_that_does_not_start_is_tried_again_twice(self, config, late, status):
        config.write_text(config.read_text() + f"late: {late}\n")
        served = serving(config)
        assert served.stderr is not None
        told = []
        for line in iter(served.stderr.readline, ""):
            told.append(line)
            if "ready" in line:
                served.terminate()
        assert served.wait(20) == status
        late_line = "Ray did not start: The current node timed out during startup."
        tries = [line for line in told if line.startswith(late_line)]
        assert [line.split()[-1] for line in tries] == ["2", "3"]
        assert any(f"error: {late_line} (3 tries; see" in line for line in told) == bool(status)
        served.stderr.close()

    def test_the_port_of_the_metrics_is_told_to_ray_and_ray_s_address_to_the_user(self, config):
        metrics = "http://127.0.0.1:9100/metrics"
        state = {"dashboard": "", "pools": {}, "metrics": [metrics]}
        config.write_text(config.read_text() + f"state: '{json.dumps(state)}'\n")
        served = serving(config, "--metrics-port", "9100")
        assert served.stderr is not None
        for line in iter(served.stderr.readline, ""):
            if line.strip() == f"Metrics: {metrics}":
                served.terminate()
        assert served.wait(20) == 0
        assert "--metrics-port 9100" in (config.parent / ".run" / "serve.log").read_text()
        served.stderr.close()

    def test_a_ray_that_is_there_has_a_port_of_its_own(self, config, monkeypatch):
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
        result = rapid("serve", str(ROOT / "serve_config.yaml"), "--metrics-port", "9100")
        assert result.exit_code == 1
        assert "ray start --metrics-export-port" in result.stderr

    def test_nothing_to_stop(self, config):
        assert rapid("stop").exit_code == 0


class ScriptedServe:
    """Ray's API for configurations: what runs, what was sent, and how it ends."""

    def __init__(self, **state):
        self.state, self.sent, self.headers = state, None, None
        self.address = None
        self.http_options = {"host": "127.0.0.1", "port": 8000, "root_path": ""}

    def __call__(self, address, headers):
        if address == "http://127.0.0.1:1":
            raise ConnectionError
        self.address, self.headers = address, headers
        return self

    def get_serve_details(self):
        return {
            "applications": {"rapid": self.state} if self.state else {},
            "http_options": self.http_options if self.state else None,
            "proxy_location": "HeadOnly",
        }

    def deploy_applications(self, content):
        self.sent = content


class TestApply:
    @pytest.fixture
    def serve(self, monkeypatch):
        def running(**state):
            scripted = ScriptedServe(**state)
            monkeypatch.setenv("RAY_DASHBOARD_ADDRESS", "http://127.0.0.1:8265")
            monkeypatch.setattr("ray.dashboard.modules.serve.sdk.ServeSubmissionClient", scripted)
            return scripted

        return running

    @pytest.fixture
    def edited(self, tmp_path):
        file = yaml.safe_load((ROOT / "serve_config.yaml").read_text(encoding="utf-8"))
        before = copy.deepcopy(file["applications"][0])
        file["applications"][0]["args"]["api"]["max_choices"] = 3
        path = tmp_path / "edited.yaml"
        path.write_text(yaml.safe_dump(file), encoding="utf-8")
        return path, file, before

    def test_it_says_what_changes(self, serve, edited):
        path, _, before = edited
        ray = serve(status="RUNNING", deployed_app_config=before)
        result = rapid("apply", str(path))
        assert result.exit_code == 0, result.output
        assert "Ingress: takes new settings, no replica is replaced" in result.stderr
        assert "Target" not in result.stderr
        assert ray.sent["applications"][0]["args"] == before["args"]

    def test_it_says_what_only_a_restart_changes(self, serve, edited):
        path, file, before = edited
        file["http_options"]["port"] = 8001
        path.write_text(yaml.safe_dump(file), encoding="utf-8")
        serve(status="RUNNING", deployed_app_config=before)
        result = rapid("apply", str(path))
        assert "http_options.port: stays as it is until a restart" in result.stderr
        assert "http_options.host" not in result.stderr
        assert "proxy_location" not in result.stderr

    def test_after_a_failed_change_all_is_sent(self, serve, edited):
        path, file, before = edited
        before["args"]["api"]["max_choices"] = 0
        ray = serve(status="DEPLOY_FAILED", message="max_choices", deployed_app_config=before)
        result = rapid("apply", str(path))
        assert ray.sent["applications"][0]["args"] == file["applications"][0]["args"]
        assert ray.sent["logging_config"] == file["logging_config"]
        assert result.exit_code == 1  # it says what Serve says
        assert "the application rapid is DEPLOY_FAILED: max_choices" in result.stderr

    def test_a_mistake_is_refused_before_anything_is_sent(self, serve, edited):
        path, _, before = edited
        path.write_text(path.read_text().replace("max_choices: 3", "max_choices: 0"))
        ray = serve(status="RUNNING", deployed_app_config=before)
        result = rapid("apply", str(path))
        assert result.exit_code == 2
        assert "api.max_choices: Input should be greater than or equal to 1" in result.stderr
        assert ray.sent is None

    @pytest.mark.parametrize(
        ("address", "sent"),
        [("http://127.0.0.1:8265", {"authorization": "Bearer a-token"}), ("http://10.0.0.1:1", {})],
    )
    def test_the_token_goes_to_a_ray_on_this_machine_alone(
        self, serve, edited, tmp_path, monkeypatch, address, sent
    ):
        monkeypatch.setattr(Path, "home", lambda: tmp_path)
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("a-token\n")
        path, _, before = edited
        ray = serve(status="RUNNING", deployed_app_config=before)
        assert rapid("apply", str(path), "--address", address).exit_code == 0
        assert ray.headers == sent

    def test_a_ray_that_asks_for_a_token(self, edited, monkeypatch):
        def refused(address, headers):
            raise AuthenticationError("no token")

        monkeypatch.setattr("ray.dashboard.modules.serve.sdk.ServeSubmissionClient", refused)
        result = rapid("apply", str(edited[0]), "--address", "http://127.0.0.1:8265")
        assert result.exit_code == 1
        assert "asks for a token: set RAY_AUTH_MODE=token" in result.stderr

    def test_it_reaches_this_folder_s_server_and_no_other(self, serve, edited, config, monkeypatch):
        path, _, before = edited
        ray = serve(status="RUNNING", deployed_app_config=before)
        monkeypatch.delenv("RAY_DASHBOARD_ADDRESS")
        none = rapid("apply", str(path))
        assert none.exit_code == 1
        assert "was started from this folder: give the address" in none.stderr
        ServerState("http://127.0.0.1:8999").write()  # of a server that was killed
        assert rapid("apply", str(path)).exit_code == 1
        assert ray.address is None
        server = ServerProcess.start(config)
        ServerState("http://127.0.0.1:8267").write()
        assert rapid("apply", str(path)).exit_code == 0
        assert ray.address == "http://127.0.0.1:8267"
        server.stop()
        server.forget()

    def test_no_ray_there(self, serve, edited):
        serve()
        result = rapid("apply", str(edited[0]), "--address", "http://127.0.0.1:1")
        assert result.exit_code == 1
        assert "no Ray answers at http://127.0.0.1:1" in result.stderr
