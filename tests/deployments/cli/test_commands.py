"""The command line as a whole; what a command does is tested beside its module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deployments.cli import app
from tests.deployments.cli.command import rapid

ROOT = Path(__file__).parents[3]
COMMANDS = [[str(each.name)] for each in app.registered_commands]
for group in app.registered_groups:
    assert group.typer_instance is not None
    COMMANDS += [
        [str(group.name), each.name or getattr(each.callback, "__name__", "")]
        for each in group.typer_instance.registered_commands
    ]


class TestHelp:
    def test_it_loads_nothing_heavy(self):
        code = (
            "import sys; from deployments.cli import app;"
            "heavy = {'torch', 'transformers', 'ray', 'httpx', 'numpy', 'pydantic'};"
            "heavy &= sys.modules.keys();"
            "sys.exit(', '.join(heavy) or 0)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")

    @pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
    def test_every_command_explains_itself_with_an_example(self, command):
        shown = [rapid(*command, each) for each in ("-h", "--help")]
        assert [each.exit_code for each in shown] == [0, 0]
        assert "Usage" in shown[0].output == shown[1].output
        assert f"Example: rapid {' '.join(command)}" in " ".join(shown[0].output.split())

    def test_paragraphs_flow_whatever_the_lines_of_their_docstrings(self):
        shown = rapid("ask", "-h", env={"COLUMNS": "300"}).output
        assert "answer too, that nothing in them is about the question. With --json" in shown

    def test_the_program_tells_its_exit_statuses_and_completes_itself(self):
        shown = " ".join(rapid("-h").output.split())
        assert "Exit status: 0 done; 1" in shown
        assert "130 interrupted" in shown
        assert "--install-completion" in shown

    def test_what_is_typed_wrong_has_its_own_status(self):
        assert rapid("ask").exit_code == rapid("no-such-command").exit_code == 2

    def test_all_that_is_missing_is_told_at_once(self):
        said = " ".join(rapid("plan", "--context", "9").stderr.split())
        assert "Missing options '--target', '--drafter', '--gpu'." in said
        assert "Missing option '--gpu'." in " ".join(
            rapid("plan", "--target", "a", "--drafter", "b", "--context", "9").stderr.split()
        )

    @pytest.mark.parametrize("command", [[], *COMMANDS], ids=" ".join)
    def test_a_flag_shows_no_type(self, command):
        assert "<bool>" not in rapid(*command, "--help").output

    def test_it_says_what_the_embedded_models_understand(self):
        for command in ([], ["ask"], ["sample-document"]):
            assert "understand" in rapid(*command, "--help").output

    def test_a_folder_that_cannot_be_used_is_named(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / ".run").write_text("a file")
        manifests = ["manifests", str(ROOT / "serve_config.yaml"), "a", "--folder", ".run"]
        for command in (["stop"], manifests):
            result = rapid(*command)
            assert result.exit_code == 1
            said = " ".join(result.stderr.split())
            assert f"error: {tmp_path}/" in said
            assert "cannot be used: Not a directory" in said

    def test_version(self):
        assert rapid("--version").output.startswith("rapid-serve ")
