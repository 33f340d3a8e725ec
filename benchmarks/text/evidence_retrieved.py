"""What tells whether the evidence is among what was retrieved, on the split dev of the real text.

    python -m benchmarks.text.evidence_retrieved --target TARGET.gguf

No model answers anything: for each question and state of retrieval (as found, `missed`, where the
chunks with the evidence are passed over, `unrelated`, where all are from another document) the
script takes the best cosine of a chunk. It tabulates quartiles, the area under the ROC curve
against questions whose evidence was found, and the share above least cosines: the most that a
threshold, or a prior made of it, could know.

    python -m benchmarks.text.evidence_retrieved --target TARGET.gguf --drafter DRAFTER.gguf

asks the drafter too, as `orchestrator.answerable_log_odds` does, and tabulates its log odds of yes
the same way. Some three seconds a question for a drafter of 1.5 billion parameters on two shared
cores with AMX; words are kept in `--words`, so that a run resumes.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.reporting import keep, settings, table
from benchmarks.text.drafters_word import LEASTS, WORDS, Asked
from benchmarks.text.retrieved import EVIDENCE, best_cosine, retrieved
from evaluation.drivers.prompter import open_prompter, retrieval_config
from evaluation.loaders import load_items
from evaluation.tasks import load_task
from rapid.checkpoints.text import ChatText
from retrieval import make_embedder

RESAMPLES = 2_000
COSINES = (0.3, 0.39, 0.5)  # 0.39 is the product's (`retrieval.embedders`)


async def evidence_on_dev(text: ChatText, drafter: Asked | None) -> str:
    """Tabulate the best cosines on `dev`, and the drafter's words, by what was retrieved."""
    values: dict[str, list[tuple[float, float]]] = {}
    for name in ("real-text", "real-text-wrong"):
        task = load_task(name)
        task = task.model_copy(update={"source": task.source.model_copy(update={"split": "dev"})})
        items = load_items(task)
        prompter = await open_prompter(task, items, text, text)
        embedder = make_embedder(retrieval_config(task.retrieval).embedder)
        told = []
        for item in items:
            for condition in task.conditions:
                found = await retrieved(item, condition, prompter, embedder)
                state = condition.name
                if condition.corruption == "none":
                    state = EVIDENCE[found.evidence_found]
                told.append((state, f"{item.id} {condition.name}", found))
        await prompter.close()
        said = [0.0] * len(told)
        if drafter is not None:
            said = await asyncio.gather(*(drafter.log_odds(key, found) for _, key, found in told))
        for (state, _, found), word in zip(told, said, strict=True):
            values.setdefault(state, []).append((best_cosine(found.chunks), word))
    pages = [_by_state({key: [a for a, _ in each] for key, each in values.items()}, COSINES)]
    if drafter is not None:
        words = {key: [word for _, word in each] for key, each in values.items()}
        pages.append(_by_state(words, LEASTS))
    return "\n".join(pages)


def area(good: Sequence[float], bad: Sequence[float]) -> str:
    """Return the area under the ROC curve with its interval, by resampling either side."""
    higher = np.subtract.outer(good, bad)
    wins = (higher > 0) + 0.5 * (higher == 0)  # the area is their mean (Mann and Whitney)
    draw = np.random.default_rng(0)
    areas = [
        wins[np.ix_(*(draw.integers(size, size=size) for size in wins.shape))].mean()
        for _ in range(RESAMPLES)
    ]
    low, high = np.quantile(areas, [0.025, 0.975])
    return f"{wins.mean():.2f} ({low:.2f} to {high:.2f})"


def _by_state(values: dict[str, list[float]], leasts: Sequence[float]) -> str:
    """Tabulate a number by what was retrieved: quartiles, area, share above each of `leasts`."""
    good = values["found"]
    rows = []
    for state, bad in values.items():
        low, middle, high = np.quantile(bad, [0.25, 0.5, 0.75])
        rows.append(
            (
                state,
                len(bad),
                f"{middle:.2f} ({low:.2f} to {high:.2f})",
                "" if state == "found" else area(good, bad),
                *(f"{np.mean([value >= least for value in bad]):.2f}" for least in leasts),
            )
        )
    heads = ["evidence", "questions", "median (quartiles)", "area under ROC (95 %)"]
    return table([*heads, *(f"at least {least:g}" for least in leasts)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="counts tokens")
    parser.add_argument("--drafter", help="asked for its word")
    parser.add_argument("--name", default="evidence-retrieved", help="of the kept result")
    parser.add_argument("--words", type=Path, default=WORDS)
    options = parser.parse_args()
    text = ChatText.load(options.target)
    drafter = Asked(options.drafter, options.words) if options.drafter else None
    try:
        page = asyncio.run(evidence_on_dev(text, drafter))
    finally:
        if drafter is not None:
            drafter.close()
    told = {name: getattr(options, name) for name in ("target", "drafter", "name")}
    report = {"settings": settings(argparse.Namespace(**told))}
    keep(options.name, "What tells whether the evidence was retrieved (dev split)", page, report)


if __name__ == "__main__":
    main()
