"""Report sections on the quality of answers, under the first condition."""

from __future__ import annotations

from statistics import fmean

from evaluation.recipes import load_recipe
from evaluation.reports.estimates import mean
from evaluation.reports.run_results import ByItem, RunResults, estimate_wins, in_group, pair_results
from evaluation.reports.tables import by_system, table, with_interval, with_sign
from evaluation.systems import System


def scores(run: RunResults) -> str:
    """Return a table of scores by system, with two checks.

    The checks are how often all evidence was retrieved, and how often a lossless system's answer
    differs from plain decoding's. The table splits the items by the first of them as well.
    """
    found = by_system(
        run,
        lambda _, results, __: with_interval(run.scores(results)),
        run.score_rows,
        run.score_columns,
    )
    return found + _evidence(run) + _same_as_plain(run)


def differences(run: RunResults) -> str:
    """Return tables of score differences from plain decoding and from the best RAG system.

    The best RAG system is chosen for each column.
    """
    tables: list[str] = []
    plain = run.plain
    others = {name: system for name, system in run.score_rows.items() if system != plain}
    if plain is not None and others:
        told = by_system(
            run,
            lambda _, results, column: with_sign(
                run.difference(results, run.headline(plain, column))
            ),
            others,
            run.score_columns,
        )
        tables.append(f"Minus {plain.name}:\n\n{told}")
    condition = run.conditions[0]
    if run.best_rag(condition) is not None:

        def to_rag(system: System, results: ByItem, column: str) -> str:
            rag = run.best_rag(condition, column)
            if rag is None or rag == system:
                return "is it"
            return with_sign(run.difference(results, run.headline(rag, column)))

        told = by_system(run, to_rag, run.score_rows, run.score_columns)
        tables.append(f"Minus the better RAG of each column:\n\n{told}")
    return "\n".join(tables)


def regrets(run: RunResults) -> str:
    """Return a table of what each system scores beyond the better of two that need no fusing.

    They are plain decoding and two models on the retrieved text (`target_reads: retrieved`), of
    which the better is chosen for each column. What is below zero is regret.
    """
    parts = [each for each in run.systems if each.is_plain or each.target_reads == "retrieved"]
    if len(parts) < 2 or run.plain is None:
        return ""
    best = {column: run.best(parts, run.conditions[0], column) for column in run.score_columns}

    def to_best(system: System, results: ByItem, column: str) -> str:
        better = best[column]
        if better is None or system == better:
            return "is it"
        return with_sign(run.difference(results, run.headline(better, column)))

    told = by_system(run, to_best, run.score_rows, run.score_columns)
    names = ", ".join(
        f"{better.name} ({column})" for column, better in best.items() if better is not None
    )
    return (
        "Minus the better of reading everything and of two models on what was retrieved, chosen "
        f"for each column: {names}. What is below zero is the regret of having taken the system."
        f"\n\n{told}"
    )


def right_where_neither_was(run: RunResults) -> str:
    """Count the items on which a system that fuses does better, and worse, than both its parts.

    The parts are plain and the drafting model alone on the retrieved text. No choice between their
    answers scores more than the better of them.
    """
    if run.plain is None:
        return ""
    rows: list[list[str]] = []
    for system in run.systems:
        rag = run.rag_of(system)
        if not system.fuses or rag is None:
            continue
        plain, alone = run.headline(run.plain), run.headline(rag)
        gaps = [
            run.score(each) - max(run.score(plain[item]), run.score(alone[item]))
            for item, each in run.headline(system).items()
            if item in plain and item in alone
        ]
        if gaps:
            shares = [[gap > 0 for gap in gaps], [gap < 0 for gap in gaps]]
            counts = [f"{sum(of)} of {len(of)}: {with_interval(mean(of))}" for of in shares]
            rows.append([system.name, rag.name, *counts])
    if not rows:
        return ""
    told = table(["system", "its own RAG", "above both", "below the better of both"], rows)
    return (
        f"Items scored above both {run.plain.name} and the system's own RAG (right where neither "
        f"was), and below the better of both (wrong where one of them was right):\n\n{told}"
    )


def by_other_groups(run: RunResults) -> str:
    """Return a table of scores for each of the task's groups after the first."""
    tables: list[str] = []
    for group in run.task.groups[1:]:
        parts = {
            value: [in_group(run.headline(s), group, value) for s in run.score_rows.values()]
            for value in run.values_of(group)
        }
        header = [f"{value} (n = {len(results[0])})" for value, results in parts.items()]
        cells = [[with_interval(run.scores(each)) for each in part] for part in parts.values()]
        rows = zip(run.score_rows, *cells, strict=True)
        tables.append(table([group, *header], rows))
    return "\n".join(tables)


def other_scores(run: RunResults) -> str:
    """Return a table of scores by each of the task's metrics after the first."""
    others = run.task.metrics[1:]
    if not others:
        return ""
    rows = [
        [name, *(with_interval(run.scores(run.headline(system), metric)) for metric in others)]
        for name, system in run.score_rows.items()
    ]
    return table(["system", *others], rows)


def items_won_and_lost(run: RunResults) -> str:
    """Return the shares of items on which each system scores above and below plain decoding.

    These are the relative success and failure of Figure 2 of RAPID's paper. Of them, the shares on
    which it does so alone, above or below its drafting model's own answer too, are the parts that
    the figure calls "SD only" and "RAPID only".
    """
    if run.plain is None:
        return ""
    plain = run.headline(run.plain)
    rows: list[list[str]] = []
    for name, system in run.score_rows.items():
        both = estimate_wins(run, run.headline(system), plain)
        if system == run.plain or both is None:
            continue
        rag, alone = run.rag_of(system), None
        if rag is not None and rag != system:
            alone = estimate_wins(run, run.headline(system), plain, run.headline(rag))
        rows.append([name, *map(with_interval, (*both, *(alone or (None, None))))])
    header = ["scores above plain", "below plain", "above plain and its RAG", "below both"]
    return table(["system", *header], rows) if rows else ""


def format_published(run: RunResults) -> str:
    """Return the published numbers of the run's recipes, each beside ours of the same items."""
    rows = list_published(run)
    if not rows:
        return ""
    return f"Theirs are not measured here.\n\n{table(PUBLISHED_HEADER, rows)}"


PUBLISHED_HEADER = ("recipe", "system", "column", "n", "theirs", "ours")


def list_published(run: RunResults) -> list[list[str]]:
    """Return a row for each number that the authors publish of the run's recipes, and ours."""
    rows: list[list[str]] = []
    for recipe in map(load_recipe, run.configuration.get("recipes", ())):
        own = [each for each in run.systems if each.name == recipe.system.name]
        for system in own or run.systems:
            for column, theirs in recipe.published.items():
                results = _part(run, system, column)
                row = [recipe.name, system.name, column, str(len(results) or "-"), f"{theirs:g}%"]
                ours = [
                    f"{with_interval(run.scores(results, metric), '.1%')} {metric}"
                    for metric in run.task.metrics
                ]
                rows.append([*row, ", ".join(ours) if results else "-"])
    return rows


def _part(run: RunResults, system: System, column: str) -> ByItem:
    """Return the results that a column of the published tables is about; none if it is unknown."""
    results = run.headline(system)
    if column in ("overall", run.task.name):
        return results
    groups = (group for group in run.task.groups if column in run.values_of(group))
    group = next(groups, None)
    return {} if group is None else in_group(results, group, column)


def _evidence(run: RunResults) -> str:
    """Return the share of items for which retrieval found all of the evidence, by column."""
    shares: list[str] = []
    for column in run.columns:
        items = {item for system in run.systems for item in run.headline(system, column)}
        known = [found for item in items if (found := run.evidence_found(item)) is not None]
        if known:
            shares.append(f"{column} {fmean(known):.2f}")
    return f"\nAll evidence retrieved: {', '.join(shares)}.\n" if shares else ""


def _same_as_plain(run: RunResults) -> str:
    """Return how often a lossless system's greedy answer differs from plain decoding's."""
    lossless = [system for system in run.systems if system.method == "lossless"]
    if run.plain is None or not lossless or run.task.temperature > 0:
        return ""
    told: list[str] = []
    for system in lossless:
        pairs = pair_results(run.headline(system), run.headline(run.plain))
        others = sum(a.prediction != b.prediction for a, b in pairs)
        told.append(f"{system.name} {others} of {len(pairs)}")
    return f"\nAnswers that are not plain's, letter for letter: {', '.join(told)}.\n"
