"""What lies under ``benchmarks/results``: of no machine, and of the systems that it names."""

from __future__ import annotations

import argparse
import getpass
import gzip
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from benchmarks import reporting
from evaluation.reports.run_results import RunResults

ROOT = Path(__file__).resolve().parents[2]
KEPT = sorted(path for path in (ROOT / "benchmarks/results").rglob("*") if path.is_file())
RUNS = sorted(path.parent for path in KEPT if path.name == "results.jsonl.gz")

# A directory from the root on, of a user's home, of Windows; a file's URL.
PATHS = re.compile(r"(?<![\w<.:/)\]*+-])(?:/[A-Za-z_][\w.-]*/|~[\w-]*/)|\b[A-Za-z]:\\|\bfile:/")
HOSTS = re.compile(r"""\bhttps?://[^\s"'<>()]+""")
USERS = re.compile(r"\b[\w.-]+@[A-Za-z][\w.-]*")
# Of what plots and pages cite, and of servers on the machine itself.
PUBLIC = {
    "127.0.0.1",
    "localhost",
    "arxiv.org",
    "creativecommons.org",
    "github.com",
    "huggingface.co",
    "matplotlib.org",
    "mozilla.org",
    "purl.org",
    "www.mozilla.org",
    "www.w3.org",
}


def traces(text: str) -> list[str]:
    """Return what tells of the machine that made a result: paths, hosts, users."""
    hosts = [url for url in HOSTS.findall(text) if urlsplit(url).hostname not in PUBLIC]
    return [found[0] for found in PATHS.finditer(text)] + hosts + USERS.findall(text)


def text_of(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


@pytest.mark.parametrize("path", KEPT, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_kept_result_tells_nothing_of_its_machine_but_the_processor(path: Path) -> None:
    assert traces(text_of(path)) == []


@pytest.mark.parametrize(
    "path",
    [path for path in KEPT if path.suffix == ".svg"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_a_kept_picture_is_small_and_leaves_its_font_to_the_reader(path: Path) -> None:
    picture = path.read_bytes()
    assert len(picture) < 100_000
    assert b"<text" in picture
    assert b"@font-face" not in picture


@pytest.mark.parametrize(
    "text",
    [
        '"out": "/srv/someone/rapid/benchmarks/results"',
        "written to /data/results",
        "model ~/models/llama",
        "model ~someone/llama",
        r"C:\Users\someone",
        "file:///etc/hosts",
        '{"url": "http://node-17.cluster.local:8000"}',
        "someone@node-17",
        "torch=/opt/torch/lib",
    ],
)
def test_traces_of_a_machine_are_found(text: str) -> None:
    assert traces(text)


@pytest.mark.parametrize(
    "text",
    ["benchmarks/results", "12 tokens/s, 3 km/h", "</svg>", "http://127.0.0.1:8000", "a/b/c.svg"],
)
def test_what_any_machine_would_write_is_none(text: str) -> None:
    assert traces(text) == []


def test_the_options_of_a_script_are_kept_without_its_machine() -> None:
    options = argparse.Namespace(
        out=ROOT / "benchmarks/results",
        url=f"http://{socket.gethostname()}:8000",
        document=Path(f"/home/{getpass.getuser()}/report.txt"),
        target=str(ROOT / "rapid/embedded/target"),
        drafter="embedded:drafter",
        lengths=[500, 1000],
    )
    assert reporting.settings(options) == {
        "document": "report.txt",
        "target": "rapid/embedded/target",
        "drafter": "embedded:drafter",
        "lengths": "[500, 1000]",
    }


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_no_kept_answer_had_rounds_without_its_drafter(run: Path) -> None:
    assert RUNS
    kept = RunResults.read(run)  # refuses such runs
    assert kept.results
    assert kept.without_drafter == []
