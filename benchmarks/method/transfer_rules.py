"""A comparison of transfer rules on the same items, with strengths chosen on other items.

    python -m benchmarks.method.transfer_rules

The candidates (`docs/algorithm.md` has the formulas of those that were kept):

* `distill`, `boost`: the paper's gradient step, and its positive part, unweighted;
* `doubt`: boost, and what distill takes away, in proportion to the drafter's certainty;
* `sure distill`, `sure boost`: the move weighted by the drafter's certainty against the target's
  (`sure boost` won and is what the product calls `boost`);
* `mixture`: (p + eta q) / (1 + eta); `sure mixture`: the weight of q also follows the certainties;
* `product`: p^(1 - w) q^w with w = eta / (1 + eta), renormalised.

Certainty is the largest probability. q is cut to its 64 best tokens, as in serving. Answers are
greedy (p, q and p_hat at the transfer temperature) or sampled at a temperature, and only whole
answers count. For every rule, the strength and the transfer temperature with the best weighted mean
on the dev split are judged on the test split. The script writes `results/transfer-rules.json` and
`.md`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.method.right_answers import Reader, task_of
from benchmarks.reporting import RESULTS, settings
from evaluation.circumstances import circumstances
from evaluation.items import Item
from evaluation.loaders import load_items
from evaluation.reports.estimates import estimate_difference, mean
from evaluation.tasks import Condition, Task

TOP = 64
PLAUSIBILITY = 0.1
SHIFTS = ("distill", "boost", "doubt", "sure distill", "sure boost")
STRENGTHS = {rule: (2, 5, 10, 20, 40) for rule in SHIFTS} | {
    rule: (0.5, 1, 2, 5) for rule in ("mixture", "sure mixture", "product")
}
CONDITIONS = (
    Condition(name="as retrieved"),
    Condition(name="half replaced", corruption="replaced", share=0.5),
    Condition(name="contradicted", corruption="contradicting"),
    Condition(name="unrelated", corruption="unrelated"),
)
WEIGHTS = {"as retrieved": 3, "half replaced": 1, "contradicted": 1, "unrelated": 1}
"""Half of the work finds the right text, half does not."""
DRAFTERS = ("upward", "self")
DECODING = ("greedy", "T 1", "T 0.1")


@dataclass(frozen=True, slots=True)
class Variant:
    """A rule with its settings; `decoding` is greedy or names the temperature of p, q and p_hat."""

    rule: str
    strength: float
    transfer_temperature: float = 1.0
    decoding: str = "greedy"

    @property
    def temperature(self) -> float:
        greedy = self.decoding == "greedy"
        return self.transfer_temperature if greedy else float(self.decoding.removeprefix("T "))


ALONE = [Variant(who, 0, 1.0, how) for who in ("target", "drafter") for how in DECODING]
CANDIDATES = [
    Variant(rule, strength, temperature, how)
    for rule, strengths in STRENGTHS.items()
    for strength in strengths
    for how, temperature in (("greedy", 0.5), ("greedy", 1.0), ("T 1", 1.0), ("T 0.1", 1.0))
]


def score(rule: str, z: torch.Tensor, q: torch.Tensor, strength: float) -> torch.Tensor:
    """Return log p_hat `[n, vocab]`, up to a constant, of tempered logits z and proposals q."""
    if rule == "target":
        return z
    if rule == "drafter":
        return q.log()
    p = torch.softmax(z, dim=-1)
    if rule == "mixture":
        return (p + strength * q).log()
    sure_q, sure_p = q.amax(-1, keepdim=True), p.amax(-1, keepdim=True)
    if rule == "sure mixture":
        return (sure_p * p + strength * sure_q * q).log()
    if rule == "product":
        share = strength / (1 + strength)
        return (1 - share) * torch.log_softmax(z, dim=-1) + share * q.clamp(min=1e-9).log()
    gain, loss = (q - p).clamp(min=0), (p - q).clamp(min=0)
    move = {"boost": gain, "distill": q - p, "doubt": gain - sure_q * loss}[rule.split(" ")[-1]]
    if rule.startswith("sure"):
        move = move * 2 * sure_q / (sure_q + sure_p)
    return z + strength * move * (q >= PLAUSIBILITY * sure_q)


def cut(q: torch.Tensor) -> torch.Tensor:
    best, ids = q.topk(min(TOP, q.shape[-1]))
    kept = torch.zeros_like(q).scatter_(-1, ids, best)
    return kept / kept.sum(-1, keepdim=True)


def chances(
    variants: Sequence[Variant], target: torch.Tensor, drafter: torch.Tensor, right: torch.Tensor
) -> Iterator[float]:
    """Yield the probability of the right answer under every variant; 0 or 1 if it is greedy."""
    at: dict[float, tuple[torch.Tensor, torch.Tensor]] = {}
    for variant in variants:
        temperature = variant.temperature
        if temperature not in at:
            q = cut(torch.softmax(drafter / temperature, dim=-1))
            at[temperature] = (target / temperature, q)
        scores = score(variant.rule, *at[temperature], variant.strength)
        if variant.decoding == "greedy":
            yield float((scores.argmax(-1) == right).all())
        else:
            logprobs = torch.log_softmax(scores, dim=-1)
            yield float(logprobs.gather(-1, right[:, None]).sum().exp())


_reader: Reader
_items: Sequence[Item]
_variants: Sequence[Variant]


def _begin(task: Task, items: Sequence[Item], variants: Sequence[Variant], models) -> None:
    global _reader, _items, _variants
    _reader, _items, _variants = Reader(task, items, models), items, variants


@torch.inference_mode()
def _answer(number: int) -> dict[tuple[str, str], list[float]]:
    """Return every variant's probability for one item, by drafter and condition."""
    item = _items[number]
    right = _reader.right_ids(item)
    target = _reader.context_logits(item, right)
    told = {}
    for condition in CONDITIONS:
        found = _reader.retrieve(item, condition)
        for drafter in DRAFTERS:
            logits = _reader.retrieved_logits(found, right, by_target=drafter == "self")
            told[drafter, condition.name] = list(
                chances(_variants, target, logits, torch.tensor(right))
            )
    return told


def run(split: str, variants: Sequence[Variant], options: argparse.Namespace):
    """Return each item's probability by variant and (drafter, condition), and the items."""
    task = task_of(split, options.lengths, options.items[split])
    items = load_items(task, None, None)
    chance: list[dict[tuple[str, str], list[float]]] = [defaultdict(list) for _ in variants]
    began = time.monotonic()
    setup = (task, items, variants, (options.target, options.drafter))
    with multiprocessing.get_context("spawn").Pool(options.processes, _begin, setup) as pool:
        for number, told in enumerate(pool.imap(_answer, range(len(items))), 1):
            for cell, values in told.items():
                for by_cell, value in zip(chance, values, strict=True):
                    by_cell[cell].append(value)
            left = (time.monotonic() - began) / number * (len(items) - number)
            sys.stderr.write(f"\r{split}: {number} of {len(items)}, {left / 60:.1f} min left ")
    sys.stderr.write("\n")
    return dict(zip(variants, chance, strict=True)), items


def weighted(chance: dict[tuple[str, str], list[float]]) -> list[float]:
    """Return the weighted mean over drafters and conditions, per item."""
    total = len(DRAFTERS) * sum(WEIGHTS.values())
    cells = [
        [WEIGHTS[condition] / total * value for value in values]
        for (_, condition), values in chance.items()
    ]
    return [sum(values) for values in zip(*cells, strict=True)]


def chosen(dev: dict[Variant, dict]) -> list[Variant]:
    """Choose the settings with the best weighted mean for every rule and decoding."""
    best: dict[tuple[str, str], tuple[float, Variant]] = {}
    for variant, chance in dev.items():
        value = mean(weighted(chance)).value
        key = (variant.rule, variant.decoding)
        if key not in best or value > best[key][0]:
            best[key] = (value, variant)
    return [variant for _, variant in best.values()]


def table(results: dict[Variant, dict], decoding: str) -> str:
    names = [(drafter, name) for drafter in DRAFTERS for name in WEIGHTS]
    mine = {v: c for v, c in results.items() if v.decoding == decoding}
    mine = dict(sorted(mine.items(), key=lambda entry: -mean(weighted(entry[1])).value))
    best = weighted(next(iter(mine.values())))
    heads = [
        "rule",
        "strength",
        "T",
        *(f"{d}, {n}" for d, n in names),
        "weighted",
        "below the best",
    ]
    lines = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for variant, chance in mine.items():
        cells = [variant.rule, f"{variant.strength:g}", f"{variant.temperature:g}"]
        cells += [f"{mean(chance[name]).value:.3f}" for name in names]
        value = mean(weighted(chance))
        gap = estimate_difference(weighted(chance), best)
        cells.append(f"{value.value:.3f} ({value.low:.3f}-{value.high:.3f})")
        cells.append(f"{gap.value:+.3f} ({gap.low:+.3f} to {gap.high:+.3f})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def by_length(results: dict[Variant, dict], items: Sequence[Item]) -> str:
    """Tabulate greedy upward drafting on chunks as retrieved, by length."""
    lengths = sorted({item.groups["length"] for item in items}, key=int)
    lines = ["| rule | " + " | ".join(lengths) + " |", "| --- " * (len(lengths) + 1) + "|"]
    for variant, chance in results.items():
        if variant.decoding == "greedy":
            values = list(zip(items, chance["upward", "as retrieved"], strict=True))
            shares = [
                mean([value for item, value in values if item.groups["length"] == length]).value
                for length in lengths
            ]
            lines.append(f"| {variant.rule} | " + " | ".join(f"{x:.3f}" for x in shares) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--dev-items", type=int, default=48, help="of each length")
    parser.add_argument("--test-items", type=int, default=200, help="of each length")
    parser.add_argument("--lengths", type=int, nargs="+", default=[500, 1000, 1500, 2500])
    parser.add_argument("--target", default="embedded:target")
    parser.add_argument("--drafter", default="embedded:drafter")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.items = {"dev": options.dev_items, "test": options.test_items}
    dev, dev_items = run("dev", [*ALONE, *CANDIDATES], options)
    test, items = run("test", chosen(dev), options)
    pages = [
        "# Transfer rules\n\nWhole answers right (sampled: their probability); made by "
        "`benchmarks/method/transfer_rules.py`. "
        f"Strengths chosen on {len(dev_items)} dev items, judged on {len(items)} test items "
        f"of {', '.join(map(str, options.lengths))} tokens; weighted {WEIGHTS}; "
        "95 % bootstrap intervals, differences paired by item.\n"
    ]
    for split, results in (("test", test), ("dev", dev)):
        for decoding in DECODING:
            pages.append(f"## {decoding}, {split}\n\n{table(results, decoding)}")
    pages.insert(4, f"## By length: greedy, upward, as retrieved, test\n\n{by_length(test, items)}")
    kept = [
        asdict(variant)
        | {"split": split, "mean": {" ".join(cell): mean(v).value for cell, v in chance.items()}}
        for split, results in (("dev", dev), ("test", test))
        for variant, chance in results.items()
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    report = {"settings": settings(options), **circumstances(), "variants": kept}
    (options.out / "transfer-rules.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.out / "transfer-rules.md").write_text("\n".join(pages))
    sys.stdout.write("\n".join(pages[:5]))


if __name__ == "__main__":
    main()
