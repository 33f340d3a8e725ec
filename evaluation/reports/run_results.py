"""The results of a run by system, condition and group, and the estimates made from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path
from statistics import fmean
from typing import Any

from evaluation.reports.estimates import Estimate, estimate_difference, mean, ratio, ratio_of_ratios
from evaluation.reports.flops import of_answer, paper_alone, paper_speculative
from evaluation.results import RESULTS, SHARD, Result, differences, read
from evaluation.systems import System
from evaluation.tasks import Condition, Task
from rapid.errors import ConfigurationError
from rapid.planning.shapes import ModelShape

ALL = "all"
SHARDS = "shards"
"""Configuration key of a run that is put together from parts: their names."""
FOUND, MISSED = "evidence found", "evidence missed"

ByItem = Mapping[str, Result]


@dataclass(frozen=True)
class RunResults:
    """The configuration of a run and its results."""

    configuration: Mapping[str, Any]
    results: Sequence[Result]

    @classmethod
    def read(cls, out_dir: Path) -> RunResults:
        """Read the run of a directory, which `evaluation.reports.report.merge` may have made.

        A directory that holds the folders of parts of a run's items is read as one run.

        Raises:
            ConfigurationError: There is no run, some of its answers had rounds without their
                drafter, or its parts were made with different configurations.
        """
        path = out_dir / RESULTS
        kept = path.with_name(f"{RESULTS}.gz")
        path = kept if kept.exists() and not path.exists() else path
        if not path.exists() and (parts := list(out_dir.glob(f"*-of-*/{RESULTS}"))):
            folders = [part.parent for part in parts]
            folders.sort(key=lambda folder: int(folder.name.partition("-")[0]))
            return reduce(cls.join, map(cls.read, folders))
        configuration, results = read(path)
        if (shard := configuration.pop(SHARD, None)) is not None:
            configuration[SHARDS] = [shard]
        run = cls(configuration, results)
        if disguised := run.without_drafter:
            first = disguised[0]
            raise ConfigurationError(
                f"{path}: {len(disguised)} answers had rounds without their drafter, so they are "
                f"not their system's; the first is of item {first.item}, {first.system}, "
                f"{first.condition}: take their lines out and run the rest again"
            )
        return run

    def join(self, other: RunResults) -> RunResults:
        """Return this part of a run and another as one, which keeps where this one was made.

        Raises:
            ConfigurationError: Their configurations differ in more than that; the message says how.
        """
        shards = [*self.configuration.get(SHARDS, ()), *other.configuration.get(SHARDS, ())]
        ours, theirs = ({**each.configuration, SHARDS: shards} for each in (self, other))
        if changes := differences(ours, theirs):
            raise ConfigurationError(
                f"parts {', '.join(shards)} are not of one run, whose configuration they share:\n"
                + "\n".join(f"  {each}" for each in changes)
            )
        known = {each.key: each for each in (*self.results, *other.results)}
        return RunResults(ours, list(known.values()))

    @cached_property
    def task(self) -> Task:
        """The task of the run, with its systems and conditions."""
        told = {key: self.configuration[key] for key in ("systems", "conditions")}
        return Task.model_validate(self.configuration["task"] | told)

    @property
    def without_drafter(self) -> list[Result]:
        """Answers of a run in process that lost their drafter on the way.

        A drafting model proposes a draft in every round, so the first position of a block is judged
        once per round. Prompt lookup may have nothing to propose, and a server may rest its
        drafter, so their answers are not checked.
        """
        if self.configuration["server"] is not None:
            return []
        drafting = {s.name for s in self.task.systems if s.is_drafted and s.drafts != "lookup"}
        return [
            each
            for each in self.results
            if each.system in drafting
            and each.error is None
            and (each.by_position[0][0] if each.by_position else 0) != each.rounds
        ]

    @cached_property
    def systems(self) -> list[System]:
        """The task's systems that have results."""
        known = {system for system, _ in self._table}
        return [each for each in self.task.systems if each.name in known]

    @cached_property
    def conditions(self) -> list[Condition]:
        """The task's conditions that have results; the first is the headline's."""
        known = {condition for _, condition in self._table}
        return [each for each in self.task.conditions if each.name in known]

    @cached_property
    def families(self) -> dict[str, list[Condition]]:
        """Groups of two or more conditions that differ by eta alone, in ascending order of eta."""
        families: dict[Condition, list[Condition]] = {}
        for each in self.conditions:
            if each.eta is not None:
                shared = each.model_copy(update={"name": "shared", "eta": None})
                families.setdefault(shared, []).append(each)
        return {
            _name_of(shared): sorted(members, key=lambda member: member.eta or 0.0)
            for shared, members in families.items()
            if len(members) > 1
        }

    @cached_property
    def columns(self) -> list[str]:
        """`ALL` and the values of the first group."""
        return [ALL, *self.values_of(self.task.groups[0])] if self.task.groups else [ALL]

    @cached_property
    def score_columns(self) -> list[str]:
        """The columns of scores: `columns`, and `FOUND` and `MISSED` where there are both.

        The two split all items, for every system, by what retrieval found for the drafter. They
        tell what the long context adds: where evidence was missed, only the target has read it.
        """
        known = {self.evidence_found(item) for item in {each.item for each in self.results}}
        return [*self.columns, FOUND, MISSED] if {True, False} <= known else self.columns

    def evidence_found(self, item: str) -> bool | None:
        """Return whether all of an item's evidence was retrieved, under the first condition."""
        return self._evidence.get((item, self.conditions[0].name))

    @cached_property
    def _evidence(self) -> dict[tuple[str, str], bool]:
        """Whether all evidence was retrieved, by item and condition; the same for all systems."""
        return {
            (each.item, each.condition): each.evidence_found
            for each in self.results
            if each.evidence_found is not None
        }

    def values_of(self, group: str) -> list[str]:
        """Return the values of a group, ascending if all are numbers, else as they first appear."""
        values = list(dict.fromkeys(r.groups[group] for r in self.results if group in r.groups))
        return sorted(values, key=int) if all(value.isdigit() for value in values) else values

    def of(self, system: System, condition: Condition, column: str = ALL) -> ByItem:
        """Return the results of a system by item, under a condition and in a column."""
        found = self._table.get((system.name, condition.name), {})
        if column == ALL:
            return found
        if column in (FOUND, MISSED):
            wanted = column == FOUND
            return {k: each for k, each in found.items() if self.evidence_found(k) is wanted}
        return in_group(found, self.task.groups[0], column)

    def headline(self, system: System, column: str = ALL) -> ByItem:
        """Return the results of a system by item, under the first condition and in a column."""
        return self.of(system, self.conditions[0], column)

    @property
    def is_timed(self) -> bool:
        """Whether answers were made one at a time, so that each has a time of its own."""
        batch: object = self.configuration["settings"]["batch"]
        return batch == 1

    @cached_property
    def plain(self) -> System | None:
        """The system that decodes plainly with the target, if it was run."""
        return next((each for each in self.systems if each.is_plain), None)

    @cached_property
    def score_rows(self) -> dict[str, System]:
        """The systems of a table of scores, by what their row is called.

        Lossless systems whose answers and scores are plain's on every item share its row.
        """
        plain, rows = self.plain, {each.name: each for each in self.systems}
        if plain is None:
            return rows
        lossless = (each for each in self.systems if each.method == "lossless")
        same = [each for each in lossless if self._answers(each) == self._answers(plain)]
        if not same:
            return rows
        many = f"{len(same)} lossless system{'s' if len(same) > 1 else ''}"
        return {
            f"{each.name} (and {many}, same answers)" if each == plain else each.name: each
            for each in self.systems
            if each not in same
        }

    def _answers(self, system: System) -> list[dict[str, tuple[str, dict[str, float]]]]:
        """Return what a system answered and scored on each item, by condition."""
        return [
            {item: (each.prediction, each.scores) for item, each in self.of(system, under).items()}
            for under in self.conditions
        ]

    def rag_of(self, system: System) -> System | None:
        """Return the system whose answers are those of the drafting model of `system` alone."""
        rags = (each for each in self.systems if each.method == "rag")
        return next((each for each in rags if each.drafts == system.drafts), None)

    def best_rag(self, condition: Condition, column: str = ALL) -> System | None:
        """Return the best system that answers from the retrieved text alone, in this column."""
        rags = [system for system in self.systems if system.method == "rag"]
        return self.best(rags, condition, column)

    def best(
        self, systems: Iterable[System], condition: Condition, column: str = ALL
    ) -> System | None:
        """Return which of some systems scores most in a column; None if none has answers there."""

        def right(system: System) -> float:
            return fmean(map(self.score, self.of(system, condition, column).values()))

        known = [system for system in systems if self.of(system, condition, column)]
        return max(known, key=right, default=None)

    def score(self, result: Result, metric: str | None = None) -> float:
        """Return the score by the task's first metric or by `metric`; an error scores 0."""
        return result.scores.get(metric or self.task.metrics[0], 0.0)

    def scores(self, results: ByItem, metric: str | None = None) -> Estimate | None:
        """Estimate the mean score."""
        return mean([self.score(each, metric) for each in results.values()]) if results else None

    def difference(self, ours: ByItem, theirs: ByItem) -> Estimate | None:
        """Estimate the difference of the mean scores on the items that both have."""
        pairs = pair_results(ours, theirs)
        if not pairs:
            return None
        return estimate_difference(
            [self.score(a) for a, _ in pairs], [self.score(b) for _, b in pairs]
        )

    @cached_property
    def shapes(self) -> tuple[ModelShape, ModelShape] | None:
        """The shapes of target and drafter; None where they are unknown, as those of a server."""
        models = self.configuration["models"]
        target = models.get("target", {}).get("shape")
        drafter = models.get("drafter", models.get("target", {})).get("shape")
        if target is None or drafter is None:
            return None
        return ModelShape.model_validate(target), ModelShape.model_validate(drafter)

    def flops(self, system: System, results: ByItem) -> Estimate | None:
        """Estimate the mean FLOPs of an answer, without errors."""
        if self.shapes is None:
            return None
        shapes = self.shapes
        counts = [of_answer(r, system, *shapes) for r in results.values() if r.error is None]
        return mean(counts) if counts else None

    def paper_flops(self, system: System, results: ByItem) -> float | None:
        """Return the FLOPs of a block by the paper's formulas, at the mean lengths of `results`.

        Return None for systems without a formula in the paper, and where a number is unknown.
        """
        has_none = system.refresh or system.drafts in ("naive", "window", "lookup")
        has_none = has_none or system.target_reads == "retrieved"
        if self.shapes is None or not results or has_none:
            return None
        target, drafter = (shape.weights for shape in self.shapes)
        drafting = target if system.drafts == "target" else drafter
        context = fmean(each.context_tokens for each in results.values())
        retrieved = fmean(each.retrieved_tokens for each in results.values())
        block = system.speculation().max_draft
        if system.method == "plain":
            return paper_alone(target, context, block)
        if system.method == "rag":
            return paper_alone(drafting, retrieved, block)
        rate = acceptance(results)
        if rate is None or not rate.value:
            return None
        return paper_speculative(target, drafting, context, retrieved, block, rate.value)

    @cached_property
    def _table(self) -> dict[tuple[str, str], dict[str, Result]]:
        table: dict[tuple[str, str], dict[str, Result]] = {}
        # Resampling goes by position, so the items of all systems are in one order.
        for each in sorted(self.results, key=lambda result: result.item):
            table.setdefault((each.system, each.condition), {})[each.item] = each
        return table


def in_group(results: ByItem, group: str, value: str) -> ByItem:
    """Return the results of items whose group `group` has this value."""
    return {item: each for item, each in results.items() if each.groups.get(group) == value}


def pair_results(ours: ByItem, theirs: ByItem) -> list[tuple[Result, Result]]:
    """Return pairs of results, for the items that both have."""
    return [(each, theirs[item]) for item, each in ours.items() if item in theirs]


def acceptance(results: ByItem) -> Estimate | None:
    """Estimate the share of drafted tokens that were accepted."""
    return _ratio(results.values(), lambda r: r.accepted, lambda r: r.drafted)


def acceptance_at(results: ByItem, position: int) -> Estimate | None:
    """Estimate the accepted share of the drafts judged at a position (from 0) of their block."""
    long = [each for each in results.values() if len(each.by_position) > position]
    return _ratio(long, lambda r: r.by_position[position][1], lambda r: r.by_position[position][0])


def tokens_per_round(results: ByItem) -> Estimate | None:
    """Estimate the mean acceptance length, which is tokens per round."""
    return _ratio(results.values(), lambda r: r.tokens, lambda r: r.rounds)


def tokens_per_second(results: ByItem) -> Estimate | None:
    """Estimate generated tokens per second of decoding, without prefills and retrieval."""
    return _ratio(results.values(), lambda r: r.tokens, _decode_s)


def speedup(ours: ByItem, theirs: ByItem) -> Estimate | None:
    """Estimate the ratio of tokens per second to another system's, on the same items."""
    pairs = [(a, b) for a, b in pair_results(ours, theirs) if _decode_s(a) and _decode_s(b)]
    if not pairs:
        return None
    ours_of, theirs_of = zip(*pairs, strict=True)
    return ratio_of_ratios(
        ([r.tokens for r in ours_of], [_decode_s(r) for r in ours_of]),
        ([r.tokens for r in theirs_of], [_decode_s(r) for r in theirs_of]),
    )


def estimate_wins(
    run: RunResults, ours: ByItem, *theirs: ByItem
) -> tuple[Estimate, Estimate] | None:
    """Estimate the shares of items on which `ours` scores above, and below, all of `theirs`."""
    scores = [
        (run.score(each), [run.score(others[item]) for others in theirs])
        for item, each in ours.items()
        if all(item in others for others in theirs)
    ]
    if not scores:
        return None
    return (
        mean([float(own > max(others)) for own, others in scores]),
        mean([float(own < min(others)) for own, others in scores]),
    )


def _decode_s(result: Result) -> float:
    return result.ms.get("decode", 0.0) / 1e3


def _ratio(
    results: Iterable[Result],
    numerator: Callable[[Result], float],
    denominator: Callable[[Result], float],
) -> Estimate | None:
    pairs = [(numerator(each), denominator(each)) for each in results]
    if not any(below for _, below in pairs):
        return None
    return ratio([above for above, _ in pairs], [below for _, below in pairs])


def _name_of(condition: Condition) -> str:
    names = {
        "none": "as retrieved",
        "replaced": f"{condition.share:.0%} replaced",
        "contradicting": "contradicted",
    }
    lengths = {"context": condition.context_tokens, "retrieval": condition.retrieval_tokens}
    told = [f"{what} {tokens}" for what, tokens in lengths.items() if tokens is not None]
    return ", ".join([names.get(condition.corruption, condition.corruption), *told])
