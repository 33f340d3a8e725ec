"""A comparison of transfer rules by length and state of retrieval.

    python -m benchmarks.method.adaptive_rules --items 100 --split dev
    python -m benchmarks.method.adaptive_rules

Three voices know something of an answer: p, the target on the whole document; q, the drafter on
retrieved text; and r, the target on retrieved text, which would be a second, short lease. Retrieval
is as found, half replaced, contradicted, unrelated, or has missed the evidence. The rules:

* `plain`, `target, retrieved`, `drafter, retrieved`, `both, retrieved` (their mean) and `both,
  retrieved, boosted`: the **bound** of a cell is the best of these five in it;
* `boost`: the product's, at two strengths; `mixture` p + q: the speculative ensemble
  (arXiv 2502.01662); `mixture of three`: p + r/2 + q;
* `contrastive` q / p where q >= 0.1 max q (arXiv 2210.15097), and `context-aware`, here r^2 / p
  (arXiv 2305.14739, with the document as the context that is taken away);
* `boost by agreement`: eta in proportion to the overlap of p and q at the positions so far;
* `one of two texts`: the mixture of whole answers, p and (q + r) / 2, with equal priors: Bayes;
* `boost by foretelling`: eta * min(4, e^(0.3 L)), where L are the log odds of q against p on the
  right tokens so far, with a memory of 0.9; `..., three voices` has (q + r) / 2 for q;
* `adaptive`: the product's, of p and q, and of p and (q + r) / 2 (`..., three voices`).

An answer is right if all its tokens are (`right_answers.py`). Each item's probabilities are kept in
`--voices`, so that a run resumes, and rules are compared again in a minute. Of each voice the 24
best tokens and the right one are kept; greedy results depend on nothing else, and at T = 1 the rest
of p counts as one token that is not moved. Writes `results/adaptive-rules-SPLIT.json` and `.md`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.method.right_answers import Reader, task_of
from benchmarks.reporting import RESULTS, settings, table
from evaluation.circumstances import circumstances
from evaluation.loaders import load_items
from evaluation.reports.estimates import estimate_difference, mean
from evaluation.tasks import Condition
from rapid.speculation.fusion import update_log_odds, weigh_retrieved

STATES = (
    Condition(name="right"),
    Condition(name="half replaced", corruption="replaced", share=0.5),
    Condition(name="contradicted", corruption="contradicting"),
    Condition(name="unrelated", corruption="unrelated"),
    Condition(name="missed", corruption="missed"),
)
LENGTHS = (500, 1000, 1500, 3000)
BEST = 24
DRAFT_TOP_K = 64
PLAUSIBILITY = 0.1
BOUNDS = (
    "plain",
    "target, retrieved",
    "drafter, retrieved",
    "both, retrieved",
    "both, retrieved, boosted",
)

Scores = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Log-scores ``[steps, tokens]`` of p, r and q ``[steps, tokens]``; the first token is the right
one."""


def log(probs: torch.Tensor) -> torch.Tensor:
    return probs.clamp(min=1e-9).log()


def boost(p: torch.Tensor, q: torch.Tensor, eta: float | torch.Tensor) -> torch.Tensor:
    sure_q, sure_p = q.amax(-1, keepdim=True), p.amax(-1, keepdim=True)
    gain = (q - p).clamp(min=0) * 2 * sure_q / (sure_q + sure_p)
    return log(p) + eta * gain * (q >= PLAUSIBILITY * sure_q)


def by_foretelling(p: torch.Tensor, q: torch.Tensor, eta: float) -> torch.Tensor:
    told = log_of_odds(p, q)
    etas, log_odds = [], 0.0
    for each in told.tolist():
        etas.append(eta * min(4.0, math.exp(0.3 * log_odds)))
        log_odds = 0.9 * log_odds + each
    return boost(p, q, torch.tensor(etas)[:, None])


def log_of_odds(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return log q/p of the right tokens, with no probability below 0.001."""
    return q[:, 0].clamp(min=1e-3).log() - p[:, 0].clamp(min=1e-3).log()


def adaptive(p: torch.Tensor, s: torch.Tensor, eta: float = 10) -> torch.Tensor:
    """`rapid.speculation.fusion.fuse_probs`, divided by the weight of p: the rest is unmoved."""
    weights, log_odds = [], 0.0
    for of_target, told in zip(p[:, 0].tolist(), s[:, 0].tolist(), strict=True):
        weights.append(weigh_retrieved(log_odds))
        log_odds = update_log_odds(log_odds, of_target, told)
    w = torch.tensor(weights)[:, None]
    mixed = (1 - w) * p + w * s * (s >= PLAUSIBILITY * s.amax(-1, keepdim=True))
    return log(mixed) + eta * w * mixed - log(1 - w)


def one_of_two_texts(p: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    told = log(s[:, 0]) - log(p[:, 0])
    before = (told.cumsum(0) - told)[:, None].clamp(-30, 30)
    return log(p + before.exp() * s)


def by_agreement(p: torch.Tensor, q: torch.Tensor, eta: float) -> torch.Tensor:
    overlap = torch.minimum(p, q).sum(-1)
    counted = torch.arange(1, len(overlap) + 1)
    so_far = (0.5 + overlap.cumsum(0) - overlap) / counted  # the prior counts as one position
    return boost(p, q, eta * so_far[:, None])


RULES: dict[str, Scores] = {
    "plain": lambda p, r, q: log(p),
    "target, retrieved": lambda p, r, q: log(r),
    "drafter, retrieved": lambda p, r, q: log(q),
    "both, retrieved": lambda p, r, q: log((r + q) / 2),
    "both, retrieved, boosted": lambda p, r, q: boost(r, q, 10),
    "boost, eta 10": lambda p, r, q: boost(p, q, 10),
    "boost, eta 5": lambda p, r, q: boost(p, q, 5),
    "mixture": lambda p, r, q: log((p + q) / 2),
    "mixture of three": lambda p, r, q: log((p + r / 2 + q) / 2.5),
    "contrastive": lambda p, r, q: (log(q) - log(p)).masked_fill(
        q < PLAUSIBILITY * q.amax(-1, keepdim=True), -30
    ),
    "context-aware": lambda p, r, q: 2 * log(r) - log(p),
    "boost by agreement, eta 20": lambda p, r, q: by_agreement(p, q, 20),
    "one of two texts": lambda p, r, q: one_of_two_texts(p, (r + q) / 2),
    "boost by foretelling": lambda p, r, q: by_foretelling(p, q, 8),
    "boost by foretelling, three voices": lambda p, r, q: by_foretelling(p, (r + q) / 2, 8),
    "adaptive": lambda p, r, q: adaptive(p, q),
    "adaptive, three voices": lambda p, r, q: adaptive(p, (r + q) / 2),
}
SAMPLED = ("plain", "boost, eta 10", "boost by foretelling", "adaptive", "adaptive, three voices")
JUDGED = (
    "boost, eta 10",
    "one of two texts",
    "boost by foretelling",
    "adaptive",
    "adaptive, three voices",
)
"""The rules whose distance from the bound gets an interval."""


def voices(reader: Reader, item) -> dict[str, torch.Tensor]:
    """Return p, r and q of the kept tokens, ``[steps, tokens, 3]``, by state of retrieval.

    The first token is the right one. A token that two voices chose has zeros in its second place.
    """
    right = reader.right_ids(item)
    p = reader.context_logits(item, right).softmax(-1)
    told = {}
    for state in STATES:
        found = reader.retrieve(item, state)
        r = reader.retrieved_logits(found, right, by_target=True).softmax(-1)
        q = cut(reader.retrieved_logits(found, right, by_target=False).softmax(-1))
        best = [each.topk(BEST).indices for each in (p, r, q)]
        ids = torch.cat([torch.tensor(right)[:, None], *best], dim=-1)
        ordered, places = ids.sort(dim=-1, stable=True)
        again = torch.zeros_like(ids, dtype=torch.bool)
        again.scatter_(-1, places[:, 1:], ordered[:, 1:] == ordered[:, :-1])
        kept = [each.gather(-1, ids).masked_fill(again, 0) for each in (p, r, q)]
        told[state.name] = torch.stack(kept, dim=-1)
    return told


def cut(q: torch.Tensor) -> torch.Tensor:
    best, ids = q.topk(DRAFT_TOP_K)
    kept = torch.zeros_like(q).scatter_(-1, ids, best)
    return kept / kept.sum(-1, keepdim=True)


def outcomes(told: torch.Tensor) -> dict[str, float]:
    """Return whether each rule gives the right answer greedily, and its probability at T = 1."""
    p, r, q = told.unbind(-1)
    chances = {}
    is_token = told.sum(-1) > 0
    is_token[:, 0] = True
    rest = (1 - p.sum(-1)).clamp(min=0)
    for name, rule in RULES.items():
        scores = rule(p, r, q).masked_fill(~is_token, -torch.inf)
        chances[name] = float((scores[:, 0] >= scores.amax(-1)).all())
        if name in SAMPLED:
            logprobs = scores[:, 0] - torch.logaddexp(scores.logsumexp(-1), log(rest))
            chances[f"{name}, T 1"] = float(logprobs.sum().exp())
    return chances


@torch.inference_mode()
def run(options: argparse.Namespace) -> dict[tuple[str, int], dict[str, list[float]]]:
    """Return each item's outcome, by state and length, by rule."""
    task = task_of(options.split, LENGTHS, options.items)
    items = load_items(task, None, None)
    reader = Reader(task, items, (options.target, options.drafter))
    options.voices.mkdir(parents=True, exist_ok=True)
    cells: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    began = time.monotonic()
    for number, item in enumerate(items, 1):
        path = options.voices / f"{item.id}.pt"
        if not path.exists():
            torch.save(voices(reader, item), path)
        for state, told in torch.load(path).items():
            for name, chance in outcomes(told).items():
                cells[state, int(item.groups["length"])][name].append(chance)
        left = (time.monotonic() - began) / number * (len(items) - number)
        sys.stderr.write(f"\r{number} of {len(items)}, {left / 60:.1f} min left ")
    sys.stderr.write("\n")
    return cells


def bound_of(cell: dict[str, list[float]]) -> str:
    return max(BOUNDS, key=lambda name: mean(cell[name]).value)


def greedy_table(cells: dict[tuple[str, int], dict[str, list[float]]]) -> str:
    """Tabulate the share of right answers: a row is a rule, a column a length in a state."""
    names = [(state.name, length) for state in STATES for length in LENGTHS]
    bounds = [mean(cells[name][bound_of(cells[name])]).value for name in names]
    rows = [["**bound**", *(f"**{value:.2f}**" for value in bounds), "", ""]]
    for rule in RULES:
        values = [mean(cells[name][rule]).value for name in names]
        worst = min(value - bound for value, bound in zip(values, bounds, strict=True))
        average = sum(values) / len(values)
        rows.append([rule, *(f"{v:.2f}" for v in values), f"{worst:+.3f}", f"{average:.3f}"])
    heads = [f"{state} {length:,}" for state, length in names]
    return table(["greedy", *heads, "worst cell", "mean"], rows)


def sampled_table(cells: dict[tuple[str, int], dict[str, list[float]]]) -> str:
    """Tabulate the probability of the right answer at T = 1, over all lengths."""
    rows = []
    for rule in SAMPLED:
        values = [
            mean([x for length in LENGTHS for x in cells[state.name, length][f"{rule}, T 1"]])
            for state in STATES
        ]
        rows.append([rule, *(f"{value.value:.3f}" for value in values)])
    return table(["T = 1", *(state.name for state in STATES)], rows)


def distances(cells: dict[tuple[str, int], dict[str, list[float]]]) -> str:
    """Tabulate the paired distance of the judged rules from the bound of each cell."""
    rows = []
    for state in STATES:
        for length in LENGTHS:
            cell = cells[state.name, length]
            bound = bound_of(cell)
            row = [state.name, f"{length:,}", bound, f"{mean(cell[bound]).value:.3f}"]
            for rule in JUDGED:
                gap = estimate_difference(cell[rule], cell[bound])
                row.append(f"{gap.value:+.3f} ({gap.low:+.3f} to {gap.high:+.3f})")
            gap = estimate_difference(cell["adaptive, three voices"], cell["boost, eta 10"])
            row.append(f"{gap.value:+.3f} ({gap.low:+.3f} to {gap.high:+.3f})")
            rows.append(row)
    heads = ["retrieval", "tokens", "best alone", "right", *JUDGED, "three voices - boost, eta 10"]
    return table(heads, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--split", default="test 3")
    parser.add_argument("--items", type=int, default=400, help="of each length")
    parser.add_argument("--target", default="embedded:target")
    parser.add_argument("--drafter", default="embedded:drafter")
    parser.add_argument("--voices", type=Path, default=Path(".eval/adaptive-voices"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    cells = run(options)
    pages = [
        "# Transfer rules by length and state of retrieval\n\nWhole answers right; made by "
        f"`benchmarks/method/adaptive_rules.py` from {options.items} items a length of the split "
        f"`{options.split}`, with 95 % bootstrap intervals of differences paired by item. The "
        "bound is the best of the first five rows.\n",
        f"## Greedy\n\n{greedy_table(cells)}",
        f"## Distance from the bound, greedy\n\n{distances(cells)}",
        f"## Sampled\n\n{sampled_table(cells)}",
    ]
    kept = [
        {"state": state, "length": length, "n": len(cell["plain"])}
        | {"mean": {name: mean(values).value for name, values in cell.items()}}
        for (state, length), cell in cells.items()
    ]
    told = {name: value for name, value in vars(options).items() if name != "voices"}
    report = {"settings": settings(argparse.Namespace(**told)), **circumstances(), "cells": kept}
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"adaptive-rules-{options.split.replace(' ', '-')}"
    (options.out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.out / f"{name}.md").write_text("\n".join(pages))
    sys.stdout.write("\n".join(pages))


if __name__ == "__main__":
    main()
