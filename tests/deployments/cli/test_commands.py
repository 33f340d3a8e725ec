"""The command line as a whole; what a command does is tested beside its module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deployments.cli import app
from tests.deployments.cli.command import rapid

ROOT = Path(__file__).parents[3]


class TestHelp:
    def test_it_loads_nothing_heavy(self):
        code = (
            "import sys; from deployments.cli import app;"
            "heavy = {'torch', 'transformers', 'ray', 'httpx', 'pydantic'} & sys.modules.keys();"
            "sys.exit(', '.join(heavy) or 0)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")

    @pytest.mark.parametrize("command", [[], *([each.name] for each in app.registered_commands)])
    def test_every_command_explains_itself(self, command):
        result = rapid(*command, "--help")
        assert result.exit_code == 0
        assert "Usage" in result.output

    def test_it_says_what_the_embedded_models_understand(self):
        for command in ([], ["ask"], ["sample-document"]):
            assert "understand" in rapid(*command, "--help").output

    def test_version(self):
        assert rapid("--version").output.startswith("rapid-serve ")
