"""What `auto` answers on real text, composed of the kept answers of its two halves.

    python -m benchmarks.text.auto_on_text --target TARGET.gguf

`auto` looks at what retrieval found, before anything is generated, and then is either `plain`, or
`fused` with the default transfer. So its answer to a question is the answer that a kept run has of
`plain` or of `rapid-adaptive`. The script retrieves again what the kept run retrieved, which the
lengths of its prompts confirm, asks the product's own rule about it (`Embedder.is_evidence`), and
tabulates the score, with differences paired by item. No model runs but the embedder; `--target` is
the target of the runs, and counts tokens only.

Retrieval is as found; `missed`, where the chunks with the evidence are passed over; and
`unrelated`, where all chunks are from another document (their cosines are computed anew). With
`--thresholds`, meant for runs on `dev`, a last table has the score for other least cosines.

    python -m benchmarks.text.auto_on_text --target TARGET.gguf --drafter DRAFTER.gguf

asks the drafter as well, as `orchestrator.answerable_log_odds` does, and tabulates what follows
from the least log odds of its yes. Some three seconds a question for a drafter of 1.5 billion
parameters on two shared cores with AMX; words are kept in `--words`, so that a run resumes.

`auto_checked.py` asks some of these questions of the product itself.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.reporting import RESULTS, keep, settings, table
from benchmarks.text.drafters_word import LEASTS, WORDS, Asked
from benchmarks.text.retrieved import EVIDENCE, best_cosine, retrieved
from evaluation.drivers.prompter import Prompter, ShortContext, open_prompter, retrieval_config
from evaluation.items import Item
from evaluation.loaders import load_items
from evaluation.reports.estimates import estimate_difference, mean
from evaluation.results import Result, read
from evaluation.tasks import Condition, Task
from rapid.checkpoints.text import ChatText
from retrieval import Embedder, make_embedder

RUNS = (RESULTS / "real-text/real-text", RESULTS / "real-text/real-text-wrong")
HALVES = ("plain", "rapid-adaptive")
OTHERS = ("plain", "rapid-adaptive", "rag-drafter")

Answers = dict[str, Result]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The decision of `auto` about one item under one condition.

    Attributes:
        item: Id of the item.
        condition: Name of the condition.
        kind: The kind of question.
        length: The document's length in tokens, rounded.
        evidence: Whether all of its evidence was retrieved.
        cosine: The best cosine of a chunk that the drafter reads.
        fuses: Whether `auto` is `fused`; else it is `plain`.
        log_odds: With which the drafter says that what was retrieved answers the question; None if
            it was not asked.
        scores: `contains` of each system, and of `auto` as composed.
        f1: The same for `f1`.
    """

    item: str
    condition: str
    kind: str
    length: int
    evidence: str
    cosine: float
    fuses: bool
    scores: dict[str, float]
    f1: dict[str, float]
    log_odds: float | None = None

    def with_word(self, least: float) -> Chosen:
        """Return the decision of an `auto` that relies on so much of the drafter's word."""
        fuses = self.fuses and self.log_odds is not None and self.log_odds >= least
        scores, f1 = (each | {"auto": each[HALVES[fuses]]} for each in (self.scores, self.f1))
        return replace(self, fuses=fuses, scores=scores, f1=f1)


async def decided(run: Path, text: ChatText, drafter: Asked | None) -> list[Chosen]:
    """Return what `auto` decides about every item of a run, with the scores.

    Raises:
        ValueError: What is retrieved now is not what the run retrieved.
    """
    configuration, results = read(run)
    told = configuration["task"] | {key: configuration[key] for key in ("systems", "conditions")}
    task = Task.model_validate(told)
    answers: dict[tuple[str, str], Answers] = {}
    for result in results:
        answers.setdefault((result.item, result.condition), {})[result.system] = result
    items = load_items(task)
    prompter = await open_prompter(task, items, text, text)
    embedder = make_embedder(retrieval_config(task.retrieval).embedder)
    try:
        chosen = [
            await _decided(item, condition, answers[item.id, condition.name], prompter, embedder)
            for item in items
            for condition in task.conditions
        ]
    finally:
        await prompter.close()
    if drafter is None:
        return [each for each, _ in chosen]
    return await asyncio.gather(*(_with_word(each, found, drafter) for each, found in chosen))


async def _with_word(chosen: Chosen, found: ShortContext, drafter: Asked) -> Chosen:
    """Ask the drafter about what `auto` would fuse."""
    if not chosen.fuses:
        return chosen
    word = await drafter.log_odds(f"{chosen.item} {chosen.condition}", found)
    return replace(chosen, log_odds=word)


async def _decided(
    item: Item, condition: Condition, answers: Answers, prompter: Prompter, embedder: Embedder
) -> tuple[Chosen, ShortContext]:
    found = await retrieved(item, condition, prompter, embedder)
    now, then = len(prompter.encode(found, True)), answers["rapid-adaptive"].retrieved_tokens
    if now != then:
        raise ValueError(
            f"{item.id}, {condition.name}: {now} tokens are retrieved, and were {then}"
        )
    fuses = embedder.is_evidence(item.messages[-1].content, found.chunks)
    chosen = Chosen(
        item=item.id,
        condition=condition.name,
        kind=item.groups["kind"],
        length=int(item.groups["length"]),
        evidence=EVIDENCE[found.evidence_found],
        cosine=round(best_cosine(found.chunks), 4),
        fuses=fuses,
        scores=composed(answers, "contains", fuses=fuses),
        f1=composed(answers, "f1", fuses=fuses),
    )
    return chosen, found


def composed(answers: Answers, metric: str, *, fuses: bool) -> dict[str, float]:
    """Return the score of every system, with that of `auto`."""
    scores = {name: answer.scores[metric] for name, answer in answers.items()}
    return scores | {"auto": scores[HALVES[fuses]]}


def by_condition(chosen: Sequence[Chosen]) -> str:
    """Tabulate scores and paired differences, a row for each condition and metric."""
    rows = []
    for condition in dict.fromkeys(each.condition for each in chosen):
        some = [each for each in chosen if each.condition == condition]
        for metric in ("scores", "f1"):
            scores = [getattr(each, metric) for each in some]
            auto = [each["auto"] for each in scores]
            others = {name: [each[name] for each in scores] for name in OTHERS}
            rows.append(
                (
                    condition,
                    len(some),
                    f"{mean([float(each.fuses) for each in some]).value:.2f}",
                    "right" if metric == "scores" else "F1",
                    f"{mean(auto).value:.3f}",
                    *(f"{mean(values).value:.3f}" for values in others.values()),
                    *(_difference(auto, values) for values in others.values()),
                )
            )
    differences = [f"auto - {name}" for name in OTHERS]
    return table(["retrieval", "n", "fused", "", "auto", *OTHERS, *differences], rows)


def by_group(chosen: Sequence[Chosen], group: str) -> str:
    """Tabulate right answers by length or kind."""
    rows = []
    for condition in dict.fromkeys(each.condition for each in chosen):
        for value in sorted({getattr(each, group) for each in chosen}):
            some = [e for e in chosen if e.condition == condition and getattr(e, group) == value]
            if some:
                scores = {name: [each.scores[name] for each in some] for name in ("auto", *OTHERS)}
                rows.append(
                    (
                        condition,
                        value,
                        len(some),
                        f"{mean([float(each.fuses) for each in some]).value:.2f}",
                        *(f"{mean(each).value:.2f}" for each in scores.values()),
                        _difference(scores["auto"], scores["plain"]),
                    )
                )
    heads = ["retrieval", group, "n", "fused", "auto", *OTHERS, "auto - plain"]
    return table(heads, rows)


def by_threshold(chosen: Sequence[Chosen], thresholds: Sequence[float]) -> str:
    """Tabulate right answers for other least cosines: the share fused and the score."""
    conditions = list(dict.fromkeys(each.condition for each in chosen))
    rows = []
    for least in thresholds:
        cells, scores = [], []
        for condition in conditions:
            some = [each for each in chosen if each.condition == condition]
            right = [each.scores[HALVES[each.cosine >= least]] for each in some]
            fused = mean([float(each.cosine >= least) for each in some]).value
            cells.append(f"{mean(right).value:.3f} ({fused:.2f})")
            scores.append(mean(right).value)
        rows.append((f"{least:.2f}", *cells, f"{sum(scores) / len(scores):.3f}"))
    return table(["least cosine", *conditions, "mean"], rows)


def _difference(ours: Sequence[float], theirs: Sequence[float]) -> str:
    gap = estimate_difference(ours, theirs)
    return f"{gap.value:+.3f} ({gap.low:+.3f} to {gap.high:+.3f})"


def by_word(chosen: Sequence[Chosen], leasts: Sequence[float]) -> str:
    """Tabulate right answers where the drafter is asked first: a row for each least log odds."""
    rows = []
    for least in leasts:
        asked_first = [each.with_word(least) for each in chosen]
        for condition in dict.fromkeys(each.condition for each in chosen):
            some = [each for each in asked_first if each.condition == condition]
            scores = {name: [each.scores[name] for each in some] for name in ("auto", *OTHERS)}
            differences = (_difference(scores["auto"], scores[name]) for name in OTHERS)
            fused = mean([float(each.fuses) for each in some]).value
            right = mean(scores["auto"]).value
            rows.append((f"{least:+.2g}", condition, f"{fused:.2f}", f"{right:.3f}", *differences))
    differences = [f"auto - {name}" for name in OTHERS]
    return table(["least log odds", "retrieval", "fused", "auto", *differences], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="counts tokens")
    parser.add_argument("--runs", type=Path, nargs="+", default=list(RUNS))
    parser.add_argument("--thresholds", type=float, nargs="*", default=[])
    parser.add_argument("--name", default="auto-on-text", help="of the kept result")
    parser.add_argument("--drafter", help="asked for its word")
    parser.add_argument("--words", type=Path, default=WORDS)
    options = parser.parse_args()
    text = ChatText.load(options.target)
    drafter = Asked(options.drafter, options.words) if options.drafter else None
    try:
        asyncio.run(_tabulate(options, text, drafter))
    finally:
        if drafter is not None:
            drafter.close()


async def _tabulate(options: argparse.Namespace, text: ChatText, drafter: Asked | None) -> None:
    told = {name: getattr(options, name) for name in ("target", "drafter", "name")}
    report = {"settings": settings(argparse.Namespace(**told))}
    files = [next(run.glob("results.jsonl*")) for run in options.runs]
    chosen = [each for file in files for each in await decided(file, text, drafter)]
    pages = [
        f"`auto` is `plain` or `rapid-adaptive`, by the best cosine of what was retrieved.\n\n"
        f"{by_condition(chosen)}",
        f"## By length\n\n{by_group(chosen, 'length')}",
        f"## By kind\n\n{by_group(chosen, 'kind')}",
        f"## By evidence\n\n{by_group(chosen, 'evidence')}",
    ]
    if options.thresholds:
        pages.append(
            "## Other thresholds\n\nRight answers (share fused) with another least cosine.\n\n"
            f"{by_threshold(chosen, options.thresholds)}"
        )
    if drafter is not None:
        pages.append(
            "## The drafter asked first\n\nRight answers where `auto` fuses only if the drafter's "
            f"log odds of yes are as high as that.\n\n{by_word(chosen, LEASTS)}"
        )
    report["decisions"] = [asdict(each) for each in chosen]
    keep(options.name, "`auto` on real text", "\n".join(pages), report)


if __name__ == "__main__":
    main()
