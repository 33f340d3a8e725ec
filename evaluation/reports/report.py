"""Pages of tables and plots, made from results alone.

`write` makes the page of one run beside its results. `merge` makes one page of several runs, with
their plots and their compressed results::

    python -m evaluation.reports.report .eval/laptop --out benchmarks/results/eval

Scores, rates and ratios are given with their 95 % bootstrap interval over items; differences and
speedups are paired by item.
"""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from evaluation.recipes import load_recipe
from evaluation.reports import plots
from evaluation.reports.run_results import (
    RESULTS,
    ByItem,
    RunResults,
    acceptance,
    acceptance_at,
    in_group,
    paired,
    speedup,
    tokens_per_round,
    tokens_per_second,
    won_and_lost,
)
from evaluation.reports.statistics import Estimate
from evaluation.systems import System

PAGE = "report.md"
PHASES = ("retrieval", "target_prefill", "drafter_prefill", "draft", "verify", "decode")

_MARKS = {1: " ▲", -1: " ▼", 0: ""}


def write(out_dir: Path) -> Path:
    """Make the page and the plots of the run in `out_dir`, and return the path of the page.

    Raises:
        ConfigurationError: `out_dir` has no run, or one that cannot be reported.
    """
    run = RunResults.read(out_dir)
    pictures = _links(plots.draw(run, out_dir / "plots"), out_dir)
    page = out_dir / PAGE
    page.write_text(f"# {run.task.name}\n\n{body(run, pictures)}", encoding="utf-8")
    return page


def merge(run_dirs: Sequence[Path], out_dir: Path) -> Path:
    """Make one page of several runs in `out_dir`, and keep each run's results in a subdirectory.

    Args:
        run_dirs: Directories of runs.
        out_dir: Directory of the page; subdirectories, named by task, get the compressed results
            and the plots.

    Returns:
        The path of the page.

    Raises:
        ConfigurationError: One of `run_dirs` has no run, or one that cannot be reported.
    """
    sections: list[str] = []
    for run_dir in run_dirs:
        run = RunResults.read(run_dir)
        kept = out_dir / run.task.name
        kept.mkdir(parents=True, exist_ok=True)
        # The header has no time, so that the same results give the same bytes.
        compressed = gzip.compress((run_dir / RESULTS).read_bytes(), mtime=0)
        (kept / f"{RESULTS}.gz").write_bytes(compressed)
        pictures = _links(plots.draw(run, kept / "plots"), out_dir)
        text = body(run, pictures).replace("\n## ", "\n### ")
        sections.append(f"## {run.task.name}\n\n{text}")
    page = out_dir / PAGE
    page.write_text("# Evaluation\n\n" + "\n".join(sections), encoding="utf-8")
    return page


def summary(out_dir: Path) -> str:
    """Return the beginning of a run's page, which is its description and scores, and its errors."""
    run = RunResults.read(out_dir)
    return "\n".join(part for part in (_made(run), _scores(run), _errors(run)) if part)


def body(run: RunResults, pictures: Mapping[str, str]) -> str:
    """Return a run's page without its title; `pictures` are links by the names of `plots.draw`."""
    metric = run.task.metrics[0]
    by = f" by {run.task.groups[0]}" if run.task.groups else ""
    sections = [
        ("", _made(run), ""),
        (f"{metric}{by}", _scores(run), "accuracy"),
        ("Against plain and against the best RAG", _differences(run), ""),
        (f"{metric} by other groups", _other_groups(run), ""),
        ("Other scores", _other_scores(run), ""),
        ("Conditions", _conditions(run), ""),
        ("Eta", _etas(run), "eta"),
        ("Items won and lost", _won_and_lost(run), "won_and_lost"),
        ("Drafts accepted", _acceptance(run), "acceptance"),
        (f"Speed{by}", _speed(run), "speed"),
        ("Where the time goes", _phases(run), ""),
        ("FLOPs of an answer", _flops(run), ""),
        ("Published", _published(run), ""),
        ("Errors", _errors(run), ""),
    ]
    page: list[str] = []
    for title, text, picture in sections:
        if text:
            page += [f"## {title}\n\n"] if title else []
            page += [f"![{title}]({pictures[picture]})\n\n"] if picture in pictures else []
            page += [text, "\n"]
    return "".join(page)


def _made(run: RunResults) -> str:
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
    lines = [
        f"{run.task.description}.",
        "",
        f"- items: {len({each.item for each in run.results})} ({source or 'all'}"
        f"{', split ' + run.task.source.split if run.task.source.split else ''})",
        f"- models: {models}",
        f"- retrieval: {how}",
        f"- answers: temperature {run.task.temperature:g}, at most {run.task.max_tokens} tokens",
        f"- run: {made}; {told.get('settings')}",
        "- intervals: 95 % bootstrap over items; ▲ and ▼: the whole interval of the paired"
        " difference is above or below zero",
    ]
    if len(run.conditions) > 1:
        lines.append(f"- where no condition is named: `{run.conditions[0].name}`")
    return "\n".join(lines) + "\n"


def _scores(run: RunResults) -> str:
    found = _by_system(run, lambda _, results, __: _score(run.scores(results)))
    return found + _evidence(run) + _same_as_plain(run)


def _evidence(run: RunResults) -> str:
    """Return how often retrieval found all of the evidence."""
    shares: list[str] = []
    for column in run.columns:
        known: dict[str, bool] = {}
        for system in run.systems:
            for item, each in run.of(system, run.conditions[0], column).items():
                if each.evidence_found is not None:
                    known[item] = each.evidence_found
        if known:
            shares.append(f"{column} {fmean(known.values()):.2f}")
    return f"\nAll evidence retrieved: {', '.join(shares)}.\n" if shares else ""


def _same_as_plain(run: RunResults) -> str:
    """Return how often lossless systems give another greedy answer than plain decoding."""
    lossless = [system for system in run.systems if system.method == "lossless"]
    if run.plain is None or not lossless or run.task.temperature > 0:
        return ""
    told: list[str] = []
    for system in lossless:
        pairs = paired(*(run.of(each, run.conditions[0]) for each in (system, run.plain)))
        others = sum(a.prediction != b.prediction for a, b in pairs)
        told.append(f"{system.name} {others} of {len(pairs)}")
    return f"\nAnswers that are not plain's, letter for letter: {', '.join(told)}.\n"


def _differences(run: RunResults) -> str:
    plain, condition = run.plain, run.conditions[0]
    tables: list[str] = []
    if plain is not None:
        base = plain
        told = _by_system(
            run,
            lambda s, results, column: _difference(
                run.difference(results, run.of(base, condition, column))
            ),
            [s for s in run.systems if s.method != "plain"],
        )
        tables.append(f"Minus {plain.name}:\n\n{told}")
    if run.best_rag(condition) is not None:

        def to_rag(system: System, results: ByItem, column: str) -> str:
            rag = run.best_rag(condition, column)
            if rag is None or rag == system:
                return "is it"
            return _difference(run.difference(results, run.of(rag, condition, column)))

        tables.append(f"Minus the better RAG of each column:\n\n{_by_system(run, to_rag)}")
    return "\n".join(tables)


def _other_groups(run: RunResults) -> str:
    tables: list[str] = []
    for group in run.task.groups[1:]:
        values = run.values_of(group)

        def cells(system: System, group: str = group, values: list[str] = values) -> list[str]:
            results = run.of(system, run.conditions[0])
            return [_score(run.scores(in_group(results, group, value))) for value in values]

        results = run.of(run.systems[0], run.conditions[0])
        header = [f"{value} (n = {len(in_group(results, group, value))})" for value in values]
        rows = [[system.name, *cells(system)] for system in run.systems]
        tables.append(_table([group, *header], rows))
    return "\n".join(tables)


def _other_scores(run: RunResults) -> str:
    others = run.task.metrics[1:]
    if not others:
        return ""
    rows = [
        [s.name, *(_score(run.scores(run.of(s, run.conditions[0]), metric)) for metric in others)]
        for s in run.systems
    ]
    return _table(["system", *others], rows)


def _conditions(run: RunResults) -> str:
    """Compare systems with plain under every condition that is not one of several etas."""
    in_families = {each.name for members in run.families.values() for each in members}
    shown = [each for each in run.conditions if each.name not in in_families]
    if len(shown) < 2:
        return ""

    def table(what: str, systems: Sequence[System], cell: Callable[[ByItem, ByItem], str]) -> str:
        rows: list[list[str]] = []
        for condition in shown:
            base = run.of(run.plain, condition) if run.plain else {}
            cells = [cell(run.of(system, condition), base) for system in systems]
            rows.append([condition.name, *cells])
        return _table([what, *(system.name for system in systems)], rows)

    tables = [table("score", run.systems, lambda ours, plain: _against(run, ours, plain))]
    if drafted := [system for system in run.systems if system.is_drafted]:
        tables.append(table("drafts accepted", drafted, lambda ours, _: _score(acceptance(ours))))
    if run.is_timed:
        speed = "tokens per second"
        tables.append(table(speed, run.systems, lambda r, _: _number(tokens_per_second(r))))
        if run.plain is not None:
            others = [system for system in run.systems if system != run.plain]
            over = f"speed over {run.plain.name}"
            tables.append(table(over, others, lambda r, base: _number(speedup(r, base))))
    return "\n".join(tables)


def _etas(run: RunResults) -> str:
    """Tabulate scores by eta for each kind of retrieval, and the eta of the highest score."""
    tables: list[str] = []
    highest: list[list[str]] = []
    fusing = [system for system in run.systems if system.fuses]
    for name, members in run.families.items():
        base = run.of(run.plain, members[0]) if run.plain else {}
        rows = [
            [system.name, *(_against(run, run.of(system, each), base) for each in members)]
            for system in fusing
        ]
        levels = [
            f"{system.name} {_score(run.scores(run.of(system, members[0])))}"
            for system in run.systems
            if system.method in ("plain", "rag")
        ]
        told = f"; {', '.join(levels)}" if levels else ""
        table = _table(["system", *(f"eta {each.eta:g}" for each in members)], rows)
        rates = [
            [system.name, *(_score(acceptance(run.of(system, each))) for each in members)]
            for system in fusing
        ]
        accepted = _table(["drafts accepted", *(f"eta {each.eta:g}" for each in members)], rates)
        tables.append(f"Retrieval {name}{told}:\n\n{table}\n{accepted}")
        for system in fusing:
            found = [(run.scores(run.of(system, each)), each.eta) for each in members]
            best = max((s.value, eta) for s, eta in found if s is not None and eta is not None)
            highest.append([system.name, name, f"{best[1]:g}", f"{best[0]:.3f}"])
    if highest:
        chosen = _table(["system", "retrieval", "eta", "score"], sorted(highest))
        tables.append(f"The eta of the highest score on these items:\n\n{chosen}")
    return "\n".join(tables)


def _won_and_lost(run: RunResults) -> str:
    if run.plain is None:
        return ""
    condition = run.conditions[0]
    rows: list[list[str]] = []
    for system in run.systems:
        base = run.of(run.plain, condition)
        both = won_and_lost(run, run.of(system, condition), base)
        if system != run.plain and both is not None:
            rows.append([system.name, _score(both[0]), _score(both[1])])
    return _table(["system", "scores above plain", "scores below plain"], rows)


def _acceptance(run: RunResults) -> str:
    drafted = [system for system in run.systems if system.is_drafted]
    if not drafted:
        return ""
    condition = run.conditions[0]
    rate = _by_system(run, lambda _, results, __: _score(acceptance(results)), drafted)
    rows: list[list[str]] = []
    longest = 0
    for system in drafted:
        results = run.of(system, condition)
        length = max((len(each.by_position) for each in results.values()), default=0)
        longest = max(longest, length)
        at = [_score(acceptance_at(results, place)) for place in range(length)]
        rows.append([system.name, _score(tokens_per_round(results)), *at])
    rows = [row + ["-"] * (longest + 2 - len(row)) for row in rows]
    header = ["system", "tokens per round", *(f"draft {place + 1}" for place in range(longest))]
    return (
        f"{rate}\nBy position in the block, of the drafts judged there:\n\n{_table(header, rows)}"
    )


def _speed(run: RunResults) -> str:
    if not run.is_timed:
        return "Not told: several answers were made at once, so that none has a time of its own.\n"
    condition = run.conditions[0]
    speeds = _by_system(run, lambda _, results, __: _number(tokens_per_second(results)))
    told = f"Tokens per second of decoding, prefills and retrieval left out:\n\n{speeds}"
    if run.plain is None:
        return told
    plain = run.plain

    def over_plain(system: System, results: ByItem, column: str) -> str:
        return _number(speedup(results, run.of(plain, condition, column)))

    others = [system for system in run.systems if system != plain]
    ratios = _by_system(run, over_plain, others)
    return f"{told}\nOver {plain.name}, on the same items:\n\n{ratios}"


def _phases(run: RunResults) -> str:
    if not run.is_timed:
        return ""
    rows: list[list[str]] = []
    for system in run.systems:
        results = [r for r in run.of(system, run.conditions[0]).values() if r.error is None]
        if results:
            means = [fmean(r.ms.get(phase, 0.0) for r in results) for phase in PHASES]
            rows.append([system.name, str(len(results)), *(f"{each:.1f}" for each in means)])
    table = _table(["system", "items", *(phase.replace("_", " ") for phase in PHASES)], rows)
    return f"Mean milliseconds of an answer; draft and verify are parts of decode.\n\n{table}"


def _flops(run: RunResults) -> str:
    if run.shapes is None:
        return ""
    ours = _by_system(run, lambda s, results, _: _scientific(run.flops(s, results)))
    rows: list[list[str]] = []
    for system in run.systems:
        theirs = run.paper_flops(system, run.of(system, run.conditions[0]))
        rows.append([system.name, "-" if theirs is None else f"{theirs:.2e}"])
    table = _table(["system", "of a block, the paper's count"], rows)
    return (
        "Prefills, drafts and verification of an answer, as `evaluation.reports.flops` counts:\n\n"
        f"{ours}\n"
        "By the formulas of the paper's Table 4 (arXiv 2502.20330), at the mean lengths and "
        f"acceptance of this run; another quantity, not to be compared with ours:\n\n{table}"
    )


def _published(run: RunResults) -> str:
    """Show the authors' numbers of a recipe beside what was measured here."""
    name = run.configuration.get("recipe")
    if name is None:
        return ""
    recipe = load_recipe(name)
    rows = [[column, f"{value:g}"] for column, value in recipe.published.items()]
    table = _table(["column of the authors' table", "theirs, in percent"], rows)
    ours = [
        f"{system.name} {metric} {_score(run.scores(run.of(system, run.conditions[0]), metric))}"
        for system in run.systems
        for metric in run.task.metrics
    ]
    return f"Theirs: recipe `{name}`, not measured here. Ours: {', '.join(ours)}.\n\n{table}"


def _errors(run: RunResults) -> str:
    failed = [each for each in run.results if each.error is not None]
    rows = [[each.system, each.condition, each.item, str(each.error)] for each in failed[:20]]
    if not failed:
        return ""
    table = _table(["system", "condition", "item", "error"], rows)
    return f"{len(failed)} answers ended in an error and score 0; the first of them:\n\n{table}"


def _by_system(
    run: RunResults,
    cell: Callable[[System, ByItem, str], str],
    systems: Sequence[System] | None = None,
) -> str:
    """Return a table of systems by the first group, under the first condition."""
    systems = run.systems if systems is None else systems
    counts = {
        column: max(len(run.of(s, run.conditions[0], column)) for s in run.systems)
        for column in run.columns
    }
    rows: list[list[str]] = []
    for system in systems:
        row = [system.name]
        for column in run.columns:
            results = run.of(system, run.conditions[0], column)
            missing = "" if len(results) == counts[column] else f" (n = {len(results)})"
            row.append(cell(system, results, column) + missing)
        rows.append(row)
    return _table(["system", *(f"{c} (n = {n})" for c, n in counts.items())], rows)


def _against(run: RunResults, ours: ByItem, plain: ByItem) -> str:
    """Return a score, marked if it is above or below plain's."""
    difference = run.difference(ours, plain)
    return _score(run.scores(ours)) + (_MARKS[difference.sign] if difference else "")


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(
        f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in line)} |\n"
        for line in lines
    )


def _score(found: Estimate | None) -> str:
    return "-" if found is None else f"{found.value:.3f} ({found.low:.3f}-{found.high:.3f})"


def _difference(found: Estimate | None) -> str:
    if found is None:
        return "-"
    interval = f"{found.low:+.3f} to {found.high:+.3f}"
    return f"{found.value:+.3f} ({interval}){_MARKS[found.sign]}"


def _number(found: Estimate | None) -> str:
    return "-" if found is None else f"{found.value:.3g} ({found.low:.3g}-{found.high:.3g})"


def _scientific(found: Estimate | None) -> str:
    return "-" if found is None else f"{found.value:.2e} ({found.low:.2e}-{found.high:.2e})"


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
