"""Reports of runs.

`write` makes the pages of one run beside its results, `merge` one page of several runs::

    python -m evaluation.reports.report .eval/laptop --out benchmarks/results/eval
    python -m evaluation.reports.report benchmarks/results/eval/laptop --out benchmarks/results/eval
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from evaluation.reports.conditions import conditions, etas
from evaluation.reports.costs import drafts_accepted, operations, phases, speed
from evaluation.reports.drawing import plots
from evaluation.reports.estimates import LEAST_ITEMS
from evaluation.reports.run_results import SHARDS, RunResults
from evaluation.reports.scores import (
    by_other_groups,
    differences,
    format_published,
    items_won_and_lost,
    other_scores,
    regrets,
    right_where_neither_was,
    scores,
)
from evaluation.reports.tables import table
from evaluation.reports.web_page import render_page
from evaluation.results import RESULTS

PAGE, WEB_PAGE = "report.md", "report.html"


def write(out_dir: Path) -> Path:
    """Make the pages and the plots of the run in `out_dir`, and return the path of the Markdown.

    Raises:
        ConfigurationError: `out_dir` has no run, or one that cannot be reported.
    """
    run = RunResults.read(out_dir)
    pictures = _links(plots.draw(run, out_dir / "plots"), out_dir)
    text = f"# {run.task.name}\n\n{body(run, pictures)}"
    page = out_dir / PAGE
    page.write_text(text, encoding="utf-8")
    inside = {link: out_dir / link for link in pictures.values()}
    web_page = render_page(text, f"rapid eval: {run.task.name}", inside)
    (out_dir / WEB_PAGE).write_text(web_page, encoding="utf-8")
    return page


def merge(run_dirs: Sequence[Path], out_dir: Path) -> Path:
    """Make one page of several runs in `out_dir`, and return its path.

    The runs are of `rapid eval` or of an earlier `merge`; parts of one run's items, which
    `rapid eval --shard` answers, are one run, if of one task. Subdirectories of `out_dir`, named by
    task, get their compressed results and their plots.

    Raises:
        ConfigurationError: One of `run_dirs` has no run, or one that cannot be reported, or parts
            are of different runs.
    """
    runs: dict[str | Path, tuple[RunResults, Path]] = {}
    for run_dir in run_dirs:
        run = RunResults.read(run_dir)
        key = run.task.name if SHARDS in run.configuration else run_dir
        runs[key] = (runs[key][0].join(run) if key in runs else run), run_dir
    sections: list[str] = []
    for run, run_dir in runs.values():
        kept = out_dir / run.task.name
        kept.mkdir(parents=True, exist_ok=True)
        lines = _lines(run) if SHARDS in run.configuration else None
        (kept / f"{RESULTS}.gz").write_bytes(_compress(run_dir / RESULTS, lines))
        pictures = _links(plots.draw(run, kept / "plots"), out_dir)
        text = body(run, pictures).replace("\n## ", "\n### ")
        sections.append(f"## {run.task.name}\n\n{text}")
    page = out_dir / PAGE
    page.write_text("# Evaluation\n\n" + "\n".join(sections), encoding="utf-8")
    return page


def _compress(results: Path, lines: bytes | None) -> bytes:
    """Return a run's lines compressed, `lines` if given; a kept run has nothing else."""
    if lines is None and not results.exists():
        return results.with_name(f"{RESULTS}.gz").read_bytes()
    # The header has no time, so that the same results give the same bytes.
    return gzip.compress(results.read_bytes() if lines is None else lines, mtime=0)


def _lines(run: RunResults) -> bytes:
    lines = [
        {"configuration": run.configuration},
        *(r.model_dump(mode="json") for r in run.results),
    ]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()


def summary(out_dir: Path) -> str:
    """Return a short form of a run's page: its description, scores and errors."""
    run = RunResults.read(out_dir)
    parts = (_describe_origin(run), scores(run), right_where_neither_was(run), _errors(run))
    return "\n".join(part for part in parts if part)


def body(run: RunResults, pictures: Mapping[str, str]) -> str:
    """Return a run's page without its title; `pictures` has links by the names of `plots.draw`."""
    metric = run.task.metrics[0]
    by = f" by {run.task.groups[0]}" if run.task.groups else ""
    sections = [
        ("", _describe_origin(run), ""),
        (f"{metric}{by}", scores(run), "accuracy"),
        ("Against plain and against the best RAG", differences(run), ""),
        ("Regret", regrets(run), ""),
        ("Right where neither was", right_where_neither_was(run), ""),
        (f"{metric} by other groups", by_other_groups(run), ""),
        ("Other scores", other_scores(run), ""),
        ("Conditions", conditions(run), ""),
        ("Eta", etas(run), "eta"),
        ("Items won and lost", items_won_and_lost(run), "won_and_lost"),
        ("Drafts accepted", drafts_accepted(run), "acceptance"),
        (f"Speed{by}", speed(run), "speed"),
        ("Where the time goes", phases(run), ""),
        ("FLOPs of an answer", operations(run), ""),
        ("Published", format_published(run), ""),
        ("Errors", _errors(run), ""),
    ]
    page: list[str] = []
    for title, text, picture in sections:
        if text:
            page += [f"## {title}\n\n"] if title else []
            page += [f"![{title}]({pictures[picture]})\n\n"] if picture in pictures else []
            page += [text, "\n"]
    return "".join(page)


def _describe_origin(run: RunResults) -> str:
    """Describe what was run, when, where and from which commit."""
    told = run.configuration
    made = ", ".join(f"{key} {value}" for key, value in told.get("made", {}).items())
    models = ", ".join(f"{role} `{each['model']}`" for role, each in told["models"].items())
    retrieval = run.task.retrieval.model_dump(exclude_none=True)
    how = ", ".join(f"{key} {value}" for key, value in retrieval.items())
    if server := told["server"]:
        models = f"those of the server at {server['url']}"
        how = f"the server's own, tokens {retrieval.get('tokens', 'as it is configured')}"
    source = ", ".join(f"{key} {value}" for key, value in run.task.source.options.items())
    number = len({each.item for each in run.results})
    whole = told.get("items", {}).get("number", number)
    of_all = "" if number == whole else f" of {whole}"
    in_parts = f", in parts {', '.join(told[SHARDS])}" if SHARDS in told else ""
    lines = [
        f"{run.task.description}.",
        "",
        f"- items: {number}{of_all} ({source or 'all'}"
        f"{', split ' + run.task.source.split if run.task.source.split else ''})",
        f"- models: {models}",
        f"- retrieval: {how}",
        f"- answers: temperature {run.task.temperature:g}, "
        + (f"top_k {run.task.top_k}, " if run.task.top_k else "")
        + f"at most {run.task.max_tokens} tokens",
        f"- run: {made}; {told.get('settings')}{in_parts}",
        f"- intervals: 95 % bootstrap over items, from {LEAST_ITEMS} items on; ▲ and ▼: the whole"
        " interval of the paired difference is above or below zero",
    ]
    if len(run.conditions) > 1:
        lines.append(f"- where no condition is named: `{run.conditions[0].name}`")
    return "\n".join(lines) + "\n"


def _errors(run: RunResults) -> str:
    failed = [each for each in run.results if each.error is not None]
    if not failed:
        return ""
    rows = [[each.system, each.condition, each.item, str(each.error)] for each in failed[:20]]
    first = table(["system", "condition", "item", "error"], rows)
    return f"{len(failed)} answers ended in an error and score 0; the first of them:\n\n{first}"


def _links(pictures: Mapping[str, Path], root: Path) -> dict[str, str]:
    return {name: path.relative_to(root).as_posix() for name, path in pictures.items()}


def main() -> None:
    """Parse the command line and merge the runs that it names."""
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.reports.report", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("runs", nargs="+", type=Path, help="directories of runs")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    merge(options.runs, options.out)


if __name__ == "__main__":
    main()
