"""Every command that a page or the Makefile names runs, in its smallest form.

A command that needs what tests do not have is imported and asked for its help, with the reason.
Options that a page names must be in the help of their command.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT, commands, commands_in

_HUB = "needs models of the hub"
_SERVER = "needs a server"
_KEY_ID = "needs the id of a key; tests/deployments/cli/operating/test_keys.py has one"
_MINUTES = "takes minutes at the least"

SMALLEST = {
    "benchmarks.decoding.sampling": "--quick --repeats 1",
    "benchmarks.serving.load": "--documents 1 --tokens 200 --modes plain --rates 1 --requests 2 "
    "--repeats 1",
    "benchmarks.decoding.chunk_kv": "--quick",
    "benchmarks.decoding.decode": "--quick --cases 1",
    "benchmarks.decoding.determinism": "--questions 1",
    "benchmarks.decoding.flat": "--quick",
    "benchmarks.decoding.grammars": "--quick",
    "benchmarks.engine.cpu_attention": "--quick",
    "benchmarks.engine.first_token": "--lengths 1024 --repeats 1",
    "benchmarks.engine.scheduling": "--prompt 512 --repeats 1",
    "benchmarks.pictures.readme_pictures": "",
    "benchmarks.pictures.request_trace": "",
    "benchmarks.pictures.transfer_picture": "",
    "benchmarks.fleet.fleet": "--quick --seconds 5",
    "benchmarks.serving.rounds": "--rounds 20 --repeats 1",
    "rapid check-config": "serve_config.yaml",
    "rapid eval": "--list",
    "rapid hash-key": "",
    "rapid init": "--gpus 4xh100 --document-tokens 60000 --people 40 --teams 2",
    "rapid keys create": "acme",
    "rapid keys list": "",
    "rapid manifests": "serve_config.yaml one-node",
    "rapid models list": "",
    "rapid plan": "--target llama-3.1-8b --drafter llama-3.2-1b --gpu h200 --context 4096",
    "rapid sample-document": "--tokens 500 --out sample",
    "rapid stop": "",
}
FOR_HELP = {
    "benchmarks.engine.kernel_resources": "tests/benchmarks/engine/ runs it",
    "benchmarks.gpu": "tests/benchmarks/test_gpu.py runs it",
    "benchmarks.pictures.house": "draws what is committed, and a copy has no commits",
    "rapid doctor": "its exit status tells how the machine is",
    "rapid logs": _SERVER,
    "rapid status": _SERVER,
    "rapid drain": "drains a node of a running Ray",
    "benchmarks.serving.own_text": _HUB,
    "benchmarks.serving.served_draft_length": _MINUTES,
    "benchmarks.serving.fairness": "starts the application twice, as serving.load does once",
    "benchmarks.serving.first_byte": "starts the application, as serving.load does",
    "benchmarks.serving.stored_documents": "uploads a hundred thousand passages",
    "benchmarks.serving.startup": "starts the application and no more, as serving.load does",
    "evaluation.reports.report": "needs a run of an evaluation",
    "rapid apply": _SERVER,
    "rapid keys revoke": _KEY_ID,
    "rapid keys rotate": _KEY_ID,
    "rapid ask": _SERVER,
    "rapid chat": _SERVER,
    "rapid documents add": _SERVER,
    "rapid documents list": _SERVER,
    "rapid documents verify": _SERVER,
    "rapid models get": _HUB,
    "rapid models path": _HUB,
    "rapid replay": "needs a receipt; tests/rapid/test_replay.py makes one",
    "rapid serve": "runs until it is stopped; tests/end_to_end/test_lost_ray.py does",
    "tests.clients": "installs clients",
    "tests.compliance": "needs a checkout of the suite",
    "tests.console": "needs a browser",
    "tests.dashboard": "needs Prometheus",
    "tests.faults": _MINUTES,
    "tests.faults.kills": _MINUTES,
    "tests.mutants": _MINUTES,
    "tests.security": _MINUTES,
}
_HELP = """
import contextlib, io, json, runpy, sys, warnings
from typer.testing import CliRunner
from deployments.cli import app
warnings.simplefilter("ignore")
for name in sys.argv[1].split(","):
    program, _, words = name.partition(" ")
    if program == "rapid":
        asked = CliRunner().invoke(app, [*words.split(), "--help"], env={"COLUMNS": "300"})
        status, told = asked.exit_code, asked.output
    else:
        out, sys.argv[:] = io.StringIO(), [name, "--help"]
        try:
            with contextlib.redirect_stdout(out):
                runpy.run_module(name, run_name="__main__")
            status = "no help"
        except SystemExit as end:
            status = end.code or 0
        told = out.getvalue()
    print(json.dumps([name, status, told]), flush=True)
"""


def test_the_pages_name_these_commands_and_no_others() -> None:
    assert not SMALLEST.keys() & FOR_HELP.keys()
    assert commands().keys() == SMALLEST.keys() | FOR_HELP.keys()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (".venv/bin/python -m benchmarks.serving.load", ("benchmarks.serving.load", set())),
        ("benchmarks/gpu.py --smoke", ("benchmarks.gpu", {"--smoke"})),
        (".venv/bin/rapid models get a b", ("rapid models get", set())),
        ('rapid ask "a --b" --url=x  # --c', ("rapid ask", {"--url"})),
        ("kubectl -n rapid get pods", None),
        ("python -m pytest tests", None),
    ],
)
def test_a_command_is_found_in_a_line(code: str, found: tuple[str, set[str]] | None) -> None:
    assert list(commands_in(code)) == ([found] if found else [])


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, in which a benchmark may keep what it measured."""
    folder = tmp_path_factory.mktemp("copy") / "repository"
    left_out = shutil.ignore_patterns(".*", "*.egg-info", "build", "__pycache__", "shared")
    shutil.copytree(ROOT, folder, ignore=left_out)
    return folder


@pytest.mark.slow
def test_every_command_tells_of_the_options_that_a_page_names(copy: Path) -> None:
    named = {name: set().union(*pages.values()) for name, pages in commands().items()}
    asked = [name for name, options in named.items() if options or name in FOR_HELP]
    done = subprocess.run(
        [sys.executable, "-c", _HELP, ",".join(asked)], cwd=copy, capture_output=True, text=True
    )
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [name for name, *_ in told] == asked, done.stderr[-2000:]
    assert [(name, status) for name, status, _ in told if status != 0] == []
    unknown = {name: [each for each in named[name] if each not in text] for name, _, text in told}
    assert {name: options for name, options in unknown.items() if options} == {}


def _starts_ray(name: str) -> bool:
    return name.startswith("benchmarks.serving.")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.ray) if _starts_ray(each) else each for each in SMALLEST],
)
def test_the_smallest_form_of_a_command_runs(name: str, copy: Path) -> None:
    program, *words = name.split()
    rapid = str(Path(sys.executable).parent / "rapid")
    command = [rapid, *words] if program == "rapid" else [sys.executable, "-m", program]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)  # set for tests; kernels are compiled here
    done = subprocess.run(
        [*command, *shlex.split(SMALLEST[name])],
        cwd=copy,
        input="a key",
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
