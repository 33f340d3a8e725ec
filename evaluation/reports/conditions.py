"""Sections of a page that compare conditions: what models read, and how strongly it counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from evaluation.reports.run_results import (
    ByItem,
    RunResults,
    acceptance,
    speedup,
    tokens_per_second,
)
from evaluation.reports.tables import against, table, with_interval
from evaluation.systems import System


def conditions(run: RunResults) -> str:
    """Compare systems with plain under every condition that is not one of several etas."""
    in_families = {each.name for members in run.families.values() for each in members}
    shown = [each for each in run.conditions if each.name not in in_families]
    if len(shown) < 2:
        return ""

    def by_condition(
        what: str, systems: Mapping[str, System], cell: Callable[[ByItem, ByItem], str]
    ) -> str:
        rows: list[list[str]] = []
        for condition in shown:
            base = run.of(run.plain, condition) if run.plain else {}
            cells = [cell(run.of(system, condition), base) for system in systems.values()]
            rows.append([condition.name, *cells])
        return table([what, *systems], rows)

    tables = [by_condition("score", run.score_rows, lambda ours, plain: against(run, ours, plain))]
    named = {system.name: system for system in run.systems}
    if drafted := {name: system for name, system in named.items() if system.is_drafted}:

        def accept(ours: ByItem, _: ByItem) -> str:
            return with_interval(acceptance(ours))

        tables.append(by_condition("drafts accepted", drafted, accept))
    if run.is_timed:

        def speed(ours: ByItem, _: ByItem) -> str:
            return with_interval(tokens_per_second(ours), ".3g")

        tables.append(by_condition("tokens per second", named, speed))
        if run.plain is not None:

            def over_plain(ours: ByItem, plain: ByItem) -> str:
                return with_interval(speedup(ours, plain), ".3g")

            others = {name: system for name, system in named.items() if system != run.plain}
            tables.append(by_condition(f"speed over {run.plain.name}", others, over_plain))
    return "\n".join(tables)


def etas(run: RunResults) -> str:
    """Tabulate scores by eta for each kind of retrieval, and the eta of the highest score."""
    tables: list[str] = []
    highest: list[list[str]] = []
    fusing = [system for system in run.systems if system.fuses]
    for name, members in run.families.items():
        base = run.of(run.plain, members[0]) if run.plain else {}
        levels = [
            f"{system.name} {with_interval(run.scores(run.of(system, members[0])))}"
            for system in run.systems
            if system.method in ("plain", "rag")
        ]
        told = f"; {', '.join(levels)}" if levels else ""
        found = {system.name: [run.of(system, each) for each in members] for system in fusing}
        scores = [[who, *(against(run, each, base) for each in row)] for who, row in found.items()]
        rates = [
            [who, *(with_interval(acceptance(each)) for each in row)] for who, row in found.items()
        ]
        header = [f"eta {each.eta:g}" for each in members]
        tables.append(
            f"Retrieval {name}{told}:\n\n{table(['system', *header], scores)}\n"
            f"{table(['drafts accepted', *header], rates)}"
        )
        for who, row in found.items():
            estimates = zip(map(run.scores, row), members, strict=True)
            value, eta = max((each.value, at.eta or 0.0) for each, at in estimates if each)
            highest.append([who, name, f"{eta:g}", f"{value:.3f}"])
    if highest:
        chosen = table(["system", "retrieval", "eta", "score"], sorted(highest))
        tables.append(f"The eta of the highest score on these items:\n\n{chosen}")
    return "\n".join(tables)
