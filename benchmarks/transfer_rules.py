"""Which transfer rule is best: every candidate on the same items, its strength chosen on others.

    python benchmarks/transfer_rules.py --split dev
    python benchmarks/transfer_rules.py --split test --items 120 \\
        --chosen benchmarks/results/transfer-rules-dev.json

The candidates (`docs/algorithm.md` has the formulas of those that were kept):

* `distill`, `boost`: the paper's gradient step, and its positive part;
* `doubt`: boost, and what distill takes away in proportion to the drafter's certainty;
* `sure distill`, `sure boost`: the move weighted by the drafter's certainty against the target's;
* `mixture`, `sure mixture`: (1 - w) p + w q, w fixed or by certainty;
* `product`, `sure product`: p^(1 - w) q^w, w fixed or by certainty.

Certainty is the largest probability. The proposal q is cut to its 64 best tokens as in serving.
A rule is run token by token, without speculation (`lockstep.py`): the same answers, all variants in
one batch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from lockstep import Reader, decode

import rapid
from evaluation.circumstances import circumstances
from evaluation.items import Item
from evaluation.loaders import load_items
from evaluation.prompting import open_prompter
from evaluation.tasks import Condition, Retrieval, Source, Task
from rapid.engines.text import ChatText

RESULTS = Path(__file__).parent / "results"
TOP = 64
PLAUSIBILITY = 0.1


@dataclass(frozen=True, slots=True)
class Variant:
    rule: str
    strength: float
    temperature: float

    def __str__(self) -> str:
        return f"{self.rule} {self.strength:g} at T {self.temperature:g}"


STRENGTHS = {
    "distill": (5, 10, 20, 40),
    "boost": (5, 10, 20, 40),
    "doubt": (5, 10, 20, 40),
    "sure distill": (5, 10, 20, 40),
    "sure boost": (5, 10, 20, 40),
    "mixture": (0.3, 0.5, 0.7),
    "sure mixture": (1, 2, 4),
    "product": (0.3, 0.5, 0.7),
    "sure product": (1, 2, 4),
}
VARIANTS = [Variant("target", 0, 1), Variant("drafter", 0, 1)] + [
    Variant(rule, strength, temperature)
    for rule, strengths in STRENGTHS.items()
    for strength in strengths
    for temperature in (0.5, 1.0)
]


class Rules:
    """All variants' scores at once, grouped by rule."""

    def __init__(self, variants: Sequence[Variant]) -> None:
        self._names = sorted({variant.rule for variant in variants})
        self._rule = torch.tensor([self._names.index(variant.rule) for variant in variants])
        self._strength = torch.tensor([float(v.strength) for v in variants], dtype=torch.float64)
        self._temperature = torch.tensor([v.temperature for v in variants], dtype=torch.float64)

    def __call__(
        self, target: torch.Tensor, drafter: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        scores = torch.empty(target.shape, dtype=torch.float64)
        rules = self._rule[rows]
        for number in rules.unique().tolist():
            mine = rules == number
            temperature = self._temperature[rows[mine], None]
            strength = self._strength[rows[mine], None]
            z = target[mine].double() / temperature
            q = cut(torch.softmax(drafter[mine].double() / temperature, dim=-1))
            scores[mine] = score(self._names[number], z, q, strength)
        return scores


def cut(q: torch.Tensor) -> torch.Tensor:
    best, ids = q.topk(min(TOP, q.shape[-1]))
    kept = torch.zeros_like(q).scatter_(-1, ids, best)
    return kept / kept.sum(-1, keepdim=True)


def score(rule: str, z: torch.Tensor, q: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
    """Unnormalised log-probabilities of p_hat [rows, vocab]."""
    if rule == "target":
        return z
    if rule == "drafter":
        return q
    p = torch.softmax(z, dim=-1)
    sure_q, sure_p = q.amax(-1, keepdim=True), p.amax(-1, keepdim=True)
    gain, loss = (q - p).clamp(min=0), (p - q).clamp(min=0)
    plausible = q >= PLAUSIBILITY * sure_q
    share = sure_q**strength / (sure_q**strength + sure_p**strength)
    if rule == "distill":
        return z + strength * (q - p) * plausible
    if rule == "boost":
        return z + strength * gain * plausible
    if rule == "doubt":
        return z + strength * (gain - sure_q * loss) * plausible
    weight = 2 * sure_q / (sure_q + sure_p)
    if rule == "sure distill":
        return z + strength * weight * (q - p) * plausible
    if rule == "sure boost":
        return z + strength * weight * gain * plausible
    if rule == "mixture":
        return ((1 - strength) * p + strength * q).log()
    if rule == "sure mixture":
        return ((1 - share) * p + share * q).log()
    share = strength if rule == "product" else share
    return (1 - share) * p.log() + share * q.clamp(min=1e-12).log()


CONDITIONS = (
    Condition(name="as retrieved"),
    Condition(name="half replaced", corruption="replaced", share=0.5),
    Condition(name="contradicted", corruption="contradicting"),
    Condition(name="unrelated", corruption="unrelated"),
)
WEIGHTS = {"as retrieved": 3, "half replaced": 1, "contradicted": 1, "unrelated": 1}
"""Of the mean by which a rule's strength and temperature are chosen: half the work finds the right
text, half does not."""
DRAFTERS = ("upward", "self")


@dataclass(frozen=True, slots=True)
class Cell:
    """Where accuracy is counted."""

    drafter: str
    condition: str
    length: str


class Study:
    """The models of one process, and what it is asked to answer."""

    def __init__(
        self, task: Task, items: Sequence[Item], variants: Sequence[Variant], models: Sequence[str]
    ) -> None:
        torch.set_num_threads(1)
        self._target, self._drafter = (rapid.load(model) for model in models)
        self._items = items
        self._variants, self._rules = variants, Rules(variants)
        self._runner = asyncio.Runner()
        texts = [ChatText(each.tokenizer, each.eos_ids) for each in (self._target, self._drafter)]
        self._prompter = self._runner.run(open_prompter(task, items, *texts))

    def answer(self, number: int) -> list[tuple[Cell, str, list[bool], list[float]]]:
        """Of one item under all conditions: right or wrong by variant, and drafts agreed with."""
        item = self._items[number]
        tokenizer = self._target.tokenizer
        expected = [*tokenizer.encode(item.answers[0]), tokenizer.eos_token_id]
        told = []
        for condition in CONDITIONS:
            long = self._prompter.target_prompt(item, condition).tolist()
            found = self._runner.run(self._prompter.retrieve(item, condition))
            short = self._prompter.encode(found, by_target=False)
            for drafter in DRAFTERS:
                model = self._drafter if drafter == "upward" else self._target
                answers = decode(
                    Reader(self._target, long),
                    Reader(model, short.tolist()),
                    self._rules,
                    len(self._variants),
                    expected,
                )
                cell = Cell(drafter, condition.name, item.groups["length"])
                right = [answer.is_right for answer in answers]
                agreed = [answer.num_agreed / answer.num_tokens for answer in answers]
                told.append((cell, item.groups["question"], right, agreed))
        return told


_study: Study


def _begin(*arguments) -> None:
    global _study
    _study = Study(*arguments)


def _answer(number: int):
    return _study.answer(number)


def task_of(split: str, lengths: Sequence[int], num_items: int) -> Task:
    return Task(
        name=f"transfer-rules-{split}",
        description="the same items as the laptop grid",
        source=Source(
            loader="generated",
            split=split,
            options={"lengths": {str(length): num_items for length in lengths}},
        ),
        metrics=("exact",),
        retrieval=Retrieval(chunk_tokens=64, tokens=320, embedder="lexical"),
    )


def chosen(report: dict) -> list[Variant]:
    """Of every rule the variant with the best weighted mean on the split that `report` is of."""
    best: dict[str, tuple[float, Variant]] = {}
    for row in report["variants"]:
        variant = Variant(**row["variant"])
        value = sum(
            row["mean"][drafter][name] * weight
            for drafter in DRAFTERS
            for name, weight in WEIGHTS.items()
        )
        if variant.rule not in best or value > best[variant.rule][0]:
            best[variant.rule] = (value, variant)
    return [variant for _, variant in best.values()]


def summarised(variants: Sequence[Variant], answers) -> dict:
    """Means per variant, and every item's outcomes as a string of 0 and 1 per cell."""
    outcomes = [defaultdict(str) for _ in variants]
    agreed = [defaultdict(list) for _ in variants]
    kinds = defaultdict(list)
    for cell, question, right, shares in answers:
        kinds[str(cell)].append(question)
        for number, (is_right, share) in enumerate(zip(right, shares, strict=True)):
            outcomes[number][cell] += str(int(is_right))
            agreed[number][cell].append(share)
    rows = []
    for number, variant in enumerate(variants):
        means = {
            drafter: {
                name: float(
                    np.mean(
                        [
                            int(one)
                            for cell, ones in outcomes[number].items()
                            if (cell.drafter, cell.condition) == (drafter, name)
                            for one in ones
                        ]
                    )
                )
                for name in WEIGHTS
            }
            for drafter in DRAFTERS
        }
        cells = [
            asdict(cell) | {"right": ones, "agreed": float(np.mean(agreed[number][cell]))}
            for cell, ones in outcomes[number].items()
        ]
        rows.append({"variant": asdict(variant), "mean": means, "cells": cells})
    return {"variants": rows, "questions": kinds}


def table(report: dict) -> str:
    header = [f"{drafter}, {name}" for drafter in DRAFTERS for name in WEIGHTS]
    lines = ["| rule | " + " | ".join(header) + " | weighted |", "| --- " * 10 + "|"]
    for row in report["variants"]:
        means = [row["mean"][drafter][name] for drafter in DRAFTERS for name in WEIGHTS]
        weights = [WEIGHTS[name] for _ in DRAFTERS for name in WEIGHTS]
        means.append(float(np.average(means, weights=weights)))
        name = str(Variant(**row["variant"]))
        lines.append(f"| {name} | " + " | ".join(f"{mean:.3f}" for mean in means) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--split", choices=("dev", "test"), default="dev")
    parser.add_argument("--items", type=int, default=36, help="of each length")
    parser.add_argument("--lengths", type=int, nargs="+", default=[500, 1000, 1500, 2500])
    parser.add_argument("--chosen", type=Path, help="only the best of each rule in this result")
    parser.add_argument("--target", default="embedded:target")
    parser.add_argument("--drafter", default="embedded:drafter")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    began = time.monotonic()
    variants = VARIANTS
    if options.chosen:
        variants = chosen(json.loads(options.chosen.read_text()))
    task = task_of(options.split, options.lengths, options.items)
    items = load_items(task, None, None)
    answers = []
    setup = (task, items, variants, (options.target, options.drafter))
    with multiprocessing.get_context("spawn").Pool(options.processes, _begin, setup) as pool:
        for number, told in enumerate(pool.imap(_answer, range(len(items))), 1):
            answers += told
            elapsed = time.monotonic() - began
            left = elapsed / number * (len(items) - number)
            sys.stderr.write(f"\r{number} of {len(items)} items, {left / 60:.1f} min left ")
    settings = {name: str(value) for name, value in vars(options).items()}
    report = {"settings": settings, **circumstances()} | summarised(variants, answers)
    report["variants"].sort(key=lambda row: (row["variant"]["rule"], row["variant"]["temperature"]))
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"transfer-rules-{options.split}"
    stem.with_suffix(".json").write_text(json.dumps(report) + "\n")
    stem.with_suffix(".md").write_text(table(report))
    sys.stdout.write("\n" + table(report))


if __name__ == "__main__":
    main()
