"""Transfer rules with other trainings of the embedded models, so that intervals cover models too.

    for seed in 2 3; do
        python -m rapid.embedded.training target --seed $seed --out .run/target-$seed
        python -m rapid.embedded.training drafter --seed $seed --out .run/drafter-$seed
    done
    python -m benchmarks.method.trainings .run/target-2,.run/drafter-2 .run/target-3,.run/drafter-3

Every other result on generated documents is of one target and one drafter. Here are several
trainings of both, the embedded ones first, whose seeds decide the first weights and the documents.
Pairs are of two kinds:

* **upward**: every target with every drafter, which has twice the weights and knows more;
* **equal**: every target with every *other* target as its drafter. Both have the same size, the
  same curriculum, so what fusing gains is not a better model's knowledge.

Items, states of retrieval and rules are those of `adaptive_rules.py`, of the split on which the
default was reported. Intervals resample targets, drafters and items, each by itself (the bootstrap
of crossed factors: Owen, arXiv 0711.1236). With three trainings that is a coarse view of what a
fourth one would do, so the least and the greatest pair stand beside it.

A training takes an hour of a core. Each item's probabilities are kept in `--voices`, so that a run
resumes: a quarter of an hour for two further trainings, on one core. Writes
`results/trainings.json` and `.md`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch

from benchmarks.method.adaptive_rules import BOUNDS, LENGTHS, STATES, cut, outcomes
from benchmarks.method.right_answers import Reader, task_of
from benchmarks.reporting import RESULTS, keep, settings, table
from evaluation.circumstances import circumstances
from evaluation.items import Item
from evaluation.loaders import load_items
from evaluation.reports.estimates import LEVEL, RESAMPLES

RULE = "adaptive, three voices"
OTHERS = ("plain", "drafter, retrieved", "both, retrieved", "mixture", "boost, eta 10")
ALONE = ("plain", "target, retrieved", "drafter, retrieved")
EMBEDDED = ("embedded:target", "embedded:drafter")

Scores = dict[tuple[str, int], np.ndarray]
"""Whether a rule is right, ``[targets, drafters, items]``, by state and length; NaN where target
and drafter are no pair."""


@dataclass(frozen=True, slots=True)
class Read:
    """What all models make of one item.

    Attributes:
        right: The tokens of the right answer [steps].
        documents: Each target's distributions on the document [steps, vocab].
        targets: Each target's distributions on the retrieved text, by state.
        drafters: The same of each drafter, with the tokens that are proposed.
    """

    right: list[int]
    documents: list[torch.Tensor]
    targets: dict[str, list[torch.Tensor]]
    drafters: dict[str, list[torch.Tensor]]


@torch.inference_mode()
def read(readers: list[Reader], item: Item) -> Read:
    """Run every model once on each text that it reads."""
    right = readers[0].right_ids(item)
    targets, drafters = {}, {}
    for state in STATES:
        found = readers[0].retrieve(item, state)
        for voices, by_target in ((targets, True), (drafters, False)):
            voices[state.name] = [
                reader.retrieved_logits(found, right, by_target=by_target).softmax(-1)
                for reader in readers
            ]
    documents = [reader.context_logits(item, right).softmax(-1) for reader in readers]
    return Read(right, documents, targets, drafters)


def judged(p: torch.Tensor, r: torch.Tensor, q: torch.Tensor, right: list[int]) -> dict[str, float]:
    """Return whether each rule is right, for three distributions ``[steps, vocab]``."""
    voices = torch.stack((p, r, cut(q)), dim=-1)
    first = torch.tensor(right)[:, None, None].expand(-1, 1, 3)
    of_right = voices.gather(1, first)
    return outcomes(torch.cat((of_right, voices.scatter(1, first, 0.0)), dim=1))


def pairs_of(told: Read, kind: str, state: str) -> Iterator[tuple[int, int, dict[str, float]]]:
    """Yield target, drafter and the outcome of each rule, for every pair of a kind."""
    drafts = told.drafters if kind == "upward" else told.targets
    numbers = range(len(told.documents))
    for target, drafter in product(numbers, numbers):
        if kind == "upward" or target != drafter:
            p, r = told.documents[target], told.targets[state][target]
            yield target, drafter, judged(p, r, drafts[state][drafter], told.right)


def run(options: argparse.Namespace) -> dict[str, dict[str, Scores]]:
    """Return the scores of all items, by kind of pair and rule."""
    task = task_of(options.split, LENGTHS, options.items)
    items = load_items(task, None, None)
    readers = [Reader(task, items, pair) for pair in (EMBEDDED, *options.pairs)]
    options.voices.mkdir(parents=True, exist_ok=True)
    shape = (len(readers), len(readers), options.items)
    scores: dict[str, dict[str, Scores]] = {"upward": {}, "equal": {}}
    places = dict.fromkeys(LENGTHS, 0)
    began = time.monotonic()
    for number, item in enumerate(items, 1):
        length = int(item.groups["length"])
        path = options.voices / f"{item.id}.pt"
        if not path.exists():
            torch.save(read(readers, item), path)
        told = torch.load(path, weights_only=False)
        for kind, by_rule in scores.items():
            for state in STATES:
                for target, drafter, chances in pairs_of(told, kind, state.name):
                    for rule, chance in chances.items():
                        cells = by_rule.setdefault(rule, {})
                        cell = cells.setdefault((state.name, length), np.full(shape, np.nan))
                        cell[target, drafter, places[length]] = chance
        places[length] += 1
        left = (time.monotonic() - began) / number * (len(items) - number)
        sys.stderr.write(f"\r{number} of {len(items)}, {left / 60:.1f} min left ")
    sys.stderr.write("\n")
    return scores


def by_pair(cell: np.ndarray) -> np.ndarray:
    """Return the mean over items of every pair ``[pairs]``."""
    means = cell.mean(-1).ravel()
    return means[~np.isnan(means)]


def interval(cell: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of the mean over pairs and items of ``[targets, drafters, items]``.

    A resample in which no target has a drafter is drawn again.
    """
    rng = np.random.default_rng(cell.shape[-1])
    is_pair = ~np.isnan(cell[..., 0])
    filled = np.nan_to_num(cell)
    drawn = []
    while len(drawn) < RESAMPLES:
        targets, drafters, items = (
            rng.multinomial(size, np.full(size, 1 / size)) for size in cell.shape
        )
        weights = np.outer(targets, drafters) * is_pair
        if weights.any():
            drawn.append(float((weights * (filled @ items)).sum() / weights.sum() / items.sum()))
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def pooled(cells: Scores, state: str, lengths: tuple[int, ...]) -> np.ndarray:
    return np.concatenate([cells[state, length] for length in lengths], axis=-1)


def difference(gap: np.ndarray) -> str:
    """Format a mean with its interval, and the least and the greatest pair."""
    (low, high), of_pairs = interval(gap), by_pair(gap)
    return (
        f"{of_pairs.mean():+.3f} ({low:+.3f} to {high:+.3f}); "
        f"{of_pairs.min():+.3f} to {of_pairs.max():+.3f}"
    )


def skills(scores: dict[str, Scores]) -> str:
    """Tabulate what each model gets right alone, retrieval as found."""
    count = len(next(iter(scores["plain"].values())))
    names = ["embedded", *(f"training {number}" for number in range(2, count + 1))]
    rows = []
    for rule in ALONE:
        axis = 1 if rule == "drafter, retrieved" else 0  # of the model that the rule depends on
        values = [
            np.nanmean(scores[rule]["right", length], axis=(1 - axis, 2)) for length in LENGTHS
        ]
        rows += [
            (name, rule, *(f"{value[number]:.2f}" for value in values))
            for number, name in enumerate(names)
        ]
    return table(["models", "", *(f"{length:,}" for length in LENGTHS)], rows)


def differences(scores: Mapping[str, Scores]) -> str:
    """Tabulate the rule less others, pooled over the lengths that a target reads, and at the last.

    Each cell: mean over pairs, 95 % interval over models and items; least and greatest pair.
    """
    rows = []
    for lengths in (LENGTHS[:-1], LENGTHS[-1:]):
        name = f"{lengths[0]:,} to {lengths[-1]:,}" if len(lengths) > 1 else f"{lengths[0]:,}"
        for state in STATES:
            ours = pooled(scores[RULE], state.name, lengths)
            gaps = (ours - pooled(scores[other], state.name, lengths) for other in OTHERS)
            rows.append((name, state.name, f"{by_pair(ours).mean():.3f}", *(map(difference, gaps))))
    return table(["tokens", "retrieval", RULE, *(f"less `{name}`" for name in OTHERS)], rows)


def worst_cells(scores: Mapping[str, Scores]) -> str:
    """Tabulate each pair's distance from its bounds: worst of all cells, and right on average."""
    cells = [(state.name, length) for state in STATES for length in LENGTHS]
    rows = []
    is_pair = ~np.isnan(scores[RULE][cells[0]][..., 0])
    for target, drafter in zip(*np.nonzero(is_pair), strict=True):
        values = {
            rule: np.array([scores[rule][cell][target, drafter].mean() for cell in cells])
            for rule in (*BOUNDS, RULE, "boost, eta 10")
        }
        bounds = np.max([values[rule] for rule in BOUNDS], axis=0)
        row: list[object] = [target + 1, drafter + 1]
        for rule in (RULE, "boost, eta 10"):
            gaps = values[rule] - bounds
            state, length = cells[int(gaps.argmin())]
            row += [f"{gaps.min():+.3f} ({state}, {length:,})", int((gaps.round(6) < -0.02).sum())]
        rows.append([*row, *(f"{values[rule].mean():.3f}" for rule in (RULE, "boost, eta 10"))])
    heads = ["target", "drafter"]
    for rule in (RULE, "boost, eta 10"):
        heads += [f"{rule}: worst cell", f"of {len(cells)} below -.020"]
    return table([*heads, f"mean of {RULE}", "of boost"], rows)


def pair_of(text: str) -> tuple[str, str]:
    target, _, drafter = text.partition(",")
    if not drafter:
        raise argparse.ArgumentTypeError(f"{text!r} is not TARGET,DRAFTER")
    return target, drafter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("pairs", nargs="+", type=pair_of, metavar="TARGET,DRAFTER")
    parser.add_argument("--split", default="test 3")
    parser.add_argument("--items", type=int, default=100, help="of each length")
    parser.add_argument("--voices", type=Path, default=Path(".eval/trainings-voices"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    scores = run(options)
    pages = [
        f"Whole answers right, {options.items} items a length of the split `{options.split}`.\n",
        f"## Each model alone, retrieval as found\n\n{skills(scores['upward'])}",
    ]
    for kind, by_rule in scores.items():
        pages += [
            f"## {kind.capitalize()} pairs: `adaptive` less others\n\nMean over pairs (95 % "
            "interval over models and items); least to greatest pair.\n\n"
            f"{differences(by_rule)}",
            f"## {kind.capitalize()} pairs: distance from the bound\n\nThe bound of a cell is the "
            "best of the target alone, either model on the retrieved text, and both on it, "
            f"plainly or boosted, for this pair.\n\n{worst_cells(by_rule)}",
        ]
    kept = {
        kind: [
            {"state": state, "length": length, "rule": rule}
            | {"by_pair": np.round(cell.mean(-1), 4).tolist()}
            for rule, cells in by_rule.items()
            for (state, length), cell in cells.items()
        ]
        for kind, by_rule in scores.items()
    }
    told = {name: value for name, value in vars(options).items() if name not in ("voices", "pairs")}
    told["trainings"] = len(options.pairs) + 1
    report = {"settings": settings(argparse.Namespace(**told)), **circumstances(), "right": kept}
    keep("trainings", "Transfer rules with other trainings", "\n".join(pages), report, options.out)


if __name__ == "__main__":
    main()
