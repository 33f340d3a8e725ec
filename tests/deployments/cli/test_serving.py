"""`rapid check-config`, `serve` and `stop`, with a stand-in for Ray's ``serve``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deployments.cli.server_process import running_pid, stop_running
from tests.deployments.cli.command import rapid

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

    def test_a_mistake_is_one_readable_message(self, tmp_path):
        text = (ROOT / "serve_config.yaml").read_text(encoding="utf-8")
        path = tmp_path / "config.yaml"
        path.write_text(text.replace("max_draft:", "max_drafts:"), encoding="utf-8")
        for command in ("check-config", "serve"):
            result = rapid(command, str(path))
            assert result.exit_code == 1
            assert "max_drafts" in result.stderr
            assert "Traceback" not in result.output


class TestServe:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_watched_until_it_is_told_to_stop(self, config, number):
        """`rapid serve` in a process of its own, whose shell has it ignore Ctrl-C."""
        code = (
            "import sys; from pathlib import Path; from types import SimpleNamespace as N;"
            "from deployments.cli import serving, server_process;"
            f"server_process.SERVE_COMMAND = {str(config.parent / 'bin' / 'serve')!r};"
            "engine = N(engine=N(model='a-model'));"
            "serving._checked = lambda path: N(target=engine, api=N(model='m'), is_embedded=False);"
            "serving.serve(Path('config.yaml'))"
        )
        served = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=config.parent,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        )
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

    def test_nothing_to_stop(self, config):
        assert rapid("stop").exit_code == 0
