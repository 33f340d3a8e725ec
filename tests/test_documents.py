"""What the documents show must run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import yaml

from deployments.config.serve_file import read_applications
from evaluation.recipes import recipe_names
from evaluation.table_1 import find_node, list_jobs
from rapid.catalogue import find
from rapid.embedded.generator import generate_document
from rapid.transfers import OWN_RULES

ROOT = Path(__file__).parent.parent


def python_blocks(page: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    return "\n".join(blocks)


def test_the_two_models_of_the_readme_answer_right(tmp_path, monkeypatch, capsys):
    (example,) = re.findall(
        r"```python\n([^`]*rapid\.open.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL
    )
    document = generate_document(7, 1000)
    (tmp_path / "sample").mkdir()
    (tmp_path / "sample/document.txt").write_text(document.text)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README", "exec"), {})
    first, second = (each.answer for each in document.questions if each.question in example)
    fact, listed = capsys.readouterr().out.splitlines()
    assert {fact.partition(" fused ")[0], listed} == {first, second}


def test_the_way_from_the_paper_code_runs(capsys):
    exec(compile(python_blocks("docs/from-the-paper-code.md"), "from-the-paper-code", "exec"), {})
    answer, kept = capsys.readouterr().out.strip().splitlines()
    assert answer
    assert re.fullmatch(r"\d+ of \d+ drafted tokens kept", kept)


def test_a_rule_of_ones_own_answers_as_the_page_shows(capsys):
    page, example = (
        python_blocks("docs/own-rule.md"),
        (ROOT / "examples/own_transfer.py").read_text(),
    )
    (rule,) = re.findall(r"import rapid\n.*?register_transfer\(.*?\)\n", page, flags=re.DOTALL)
    assert rule in example
    try:
        exec(compile(page, "own-rule", "exec"), {})
    finally:
        OWN_RULES.clear()
    assert capsys.readouterr().out.strip().endswith("fused geometric")


def test_the_file_of_three_teams_is_valid_and_fits_four_gpus():
    page = (ROOT / "docs/three-teams.md").read_text()
    (file,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    (config,) = read_applications(yaml.safe_load(file)).values()
    pools = (config.target.pool, config.drafter.pool, config.retriever.pool)
    assert sum(pool.max_replicas * pool.num_gpus for pool in pools) == 4
    tenants = {key.tenant for key in config.api.keys}
    assert len(tenants - {"operators"}) == 3
    assert set(config.api.tenant_weights) < tenants


def test_the_arithmetic_of_table_1_is_what_the_page_says():
    page = (ROOT / "docs/table-1.md").read_text()
    header = re.search(r"^\| jobs .*hours: (.*) \|$", page, flags=re.MULTILINE)
    assert header is not None
    nodes = [find_node(name) for name in header[1].split(" | ")]
    rows = dict(re.findall(r"^\| `([a-z0-9.-]+)`[^|]*\| (.*) \|$", page, flags=re.MULTILINE))
    jobs = list_jobs(recipe_names())
    assert rows.keys() == {job.name for job in jobs}
    for job in jobs:
        gpu = nodes[0].gpu
        assert gpu is not None
        numbers = [job.recipes[0].num_gpus, job.bytes_of_gpu(gpu) / 1e9, job.gigabytes]
        can = [job.why_not_on(node) is None for node in nodes]
        hours = [f"{job.hours_on(n):.1f}" if ok else "-" for n, ok in zip(nodes, can, strict=True)]
        assert rows[job.name].split(" | ") == [*(f"{each:.0f}" for each in numbers), *hours]


def test_the_readme_stays_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_short_name_that_a_page_shows_is_in_the_catalogue():
    pages = [ROOT / "README.md", ROOT / "Makefile", *(ROOT / "docs").glob("*.md")]
    shown = {
        name
        for page in pages
        for line in re.findall(r"rapid models (?:get|path) ([a-z0-9. -]+)", page.read_text())
        for name in line.split()
    }
    assert {"smollm2-135m", "all-minilm-l6-v2"} <= shown
    for name in shown:
        find(name)


def test_the_two_small_downloads_have_one_size():
    configs = [f"cluster/configs/{name}.yaml" for name in ("own-text", "with-own-text")]
    pages = ["README.md", "docs/start.md", "docs/models.md", *configs]
    sizes = [
        re.findall(r"(?:fetch|download)[^.;]*?\(?(\d+) MB", (ROOT / page).read_text())
        for page in pages
    ]
    assert all(sizes)
    assert {each[0] for each in sizes} == {"176"}


def test_every_configuration_for_a_cpu_is_described():
    page = (ROOT / "docs/models.md").read_text()
    for path in (ROOT / "cluster" / "configs").glob("*.yaml"):
        if "num_gpus" not in path.read_text():
            assert f"cluster/configs/{path.name}" in page


def test_the_plan_is_printed_as_shown():
    page = (ROOT / "docs/planning.md").read_text()
    command, shown = re.findall(r"```\n\$ rapid (.*?)\n(.*?)```", page, flags=re.DOTALL)[0]
    done = subprocess.run(
        [sys.executable, "-c", "from deployments.cli import app; app()", *shlex.split(command)],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.rstrip() for line in done.stdout.splitlines()] == shown.splitlines()
