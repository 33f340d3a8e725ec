"""Does retrieving again, when the drafter stops being believed, beat retrieving once?

    .venv/bin/python benchmarks/triggered_retrieval.py --split dev --items 36

The drafter's context is refreshed with what retrieval finds for the question and the text so far:

* `once`: never, the paper's way;
* `rejected`: after a rejected draft; it ends a block anyway, so nothing depends on block lengths;
* `twice rejected`: after the second rejection within eight tokens;
* `unsure`: before a position is offered where the drafter's best token has less than half of q;
* `sentence`: after every sentence, whatever was accepted: what blind refreshing would do.

All depend on the prompt, the committed text and the seed alone, so the sampled distribution stays
defined. Greedy, one token at a time (`lockstep.py`): same answers as speculation, exactly.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from lockstep import Reader
from transfer_rules import RESULTS, Rules, Variant, task_of

import rapid
from evaluation.circumstances import circumstances
from evaluation.items import Item
from evaluation.loaders import load_items
from evaluation.prompting import Prompter, open_prompter
from evaluation.statistics import mean, paired_difference
from evaluation.tasks import Condition, Task
from rapid.engines.loading import LoadedModel
from rapid.engines.text import ChatText

TRIGGERS = ("once", "rejected", "twice rejected", "unsure", "sentence")
MAX_REFRESHES = 4
MAX_TOKENS = 200
LEAST_CERTAINTY = 0.5
WINDOW = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    length: str
    question: str
    found_at_first: bool
    right: dict[str, bool]
    agreed: dict[str, float]
    refreshes: dict[str, int]


class Study:
    """The models of one process."""

    def __init__(
        self, task: Task, items: Sequence[Item], variant: Variant, models: Sequence[str]
    ) -> None:
        torch.set_num_threads(1)
        self._target, self._drafter = (rapid.load(model) for model in models)
        self._items, self._rules = items, Rules([variant])
        self._runner = asyncio.Runner()
        texts = [ChatText(each.tokenizer, each.eos_ids) for each in (self._target, self._drafter)]
        self._prompter: Prompter = self._runner.run(open_prompter(task, items, *texts))

    def answer(self, number: int) -> Outcome:
        item = self._items[number]
        found = self._runner.run(self._prompter.retrieve(item, Condition()))
        results = {trigger: self._decode(item, trigger) for trigger in TRIGGERS}
        return Outcome(
            item.groups["length"],
            item.groups["question"],
            bool(found.evidence_found),
            {trigger: right for trigger, (right, _, _) in results.items()},
            {trigger: agreed for trigger, (_, agreed, _) in results.items()},
            {trigger: count for trigger, (_, _, count) in results.items()},
        )

    def _decode(self, item: Item, trigger: str) -> tuple[bool, float, int]:
        target = Reader(self._target, self._prompter.target_prompt(item, Condition()).tolist())
        drafter = self._read(self._drafter, item, [])
        tokens: list[int] = []
        accepted: list[bool] = []
        refreshed: list[int] = []  # positions
        only = torch.zeros(1, dtype=torch.long)
        while len(tokens) < MAX_TOKENS:
            position = len(tokens)
            may = len(refreshed) < MAX_REFRESHES and position and position not in refreshed
            if may and self._is_due(trigger, drafter, tokens, accepted, refreshed):
                refreshed.append(position)
                drafter = self._read(self._drafter, item, tokens)
            token = int(self._rules(target.logits, drafter.logits, only).argmax())
            accepted.append(token == int(drafter.logits.argmax()))
            tokens.append(token)
            if token in self._target.eos_ids:
                break
            for reader in (target, drafter):
                reader.feed(torch.tensor([token]))
        text = self._target.tokenizer.decode(tokens, skip_special_tokens=True).strip()
        return text in item.answers, sum(accepted) / len(accepted), len(refreshed)

    def _is_due(
        self,
        trigger: str,
        drafter: Reader,
        tokens: list[int],
        accepted: list[bool],
        refreshed: list[int],
    ) -> bool:
        since = max(refreshed, default=0)
        if trigger == "rejected":
            return not accepted[-1] and len(tokens) - since > 2
        if trigger == "twice rejected":
            recent = accepted[max(since, len(accepted) - WINDOW) :]
            return not accepted[-1] and recent.count(False) >= 2
        if trigger == "unsure":
            sure = float(torch.softmax(drafter.logits[0], -1).max())
            return sure < LEAST_CERTAINTY and len(tokens) - since > 2
        if trigger == "sentence":
            return self._target.tokenizer.decode(tokens[-1:]).endswith(".")
        return False

    def _read(self, model: LoadedModel, item: Item, tokens: list[int]) -> Reader:
        if tokens:
            so_far = self._target.tokenizer.decode(tokens, skip_special_tokens=True)
            item = replace(item, query=f"{item.messages[-1].content} {so_far}")
        found = self._runner.run(self._prompter.retrieve(item, Condition()))
        prompt = self._prompter.encode(found, by_target=False)
        return Reader(model, [*prompt.tolist(), *tokens])


_study: Study


def _begin(*arguments) -> None:
    global _study
    _study = Study(*arguments)


def _answer(number: int) -> Outcome:
    return _study.answer(number)


def table(outcomes: Sequence[Outcome]) -> str:
    """Right answers, against retrieving once, agreement and refreshes, by kind of question."""
    lines = [
        "| questions | items | trigger | right | against once | drafts agreed with | refreshes |",
        "| --- " * 7 + "|",
    ]
    kinds = [*sorted({each.question for each in outcomes}), "all", "all, not found at first"]
    for kind in kinds:
        chosen = [
            each
            for each in outcomes
            if kind == "all"
            or each.question == kind
            or (kind.endswith("first") and not each.found_at_first)
        ]
        for trigger in TRIGGERS if chosen else ():
            right = [float(each.right[trigger]) for each in chosen]
            value = mean(right)
            difference = paired_difference(right, [float(each.right["once"]) for each in chosen])
            agreed = mean([each.agreed[trigger] for each in chosen]).value
            count = mean([float(each.refreshes[trigger]) for each in chosen]).value
            lines.append(
                f"| {kind} | {len(chosen)} | {trigger} | "
                f"{value.value:.3f} ({value.low:.3f}-{value.high:.3f}) | "
                f"{difference.value:+.3f} ({difference.low:+.3f} to {difference.high:+.3f}) | "
                f"{agreed:.3f} | {count:.2f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--split", choices=("dev", "test"), default="dev")
    parser.add_argument("--items", type=int, default=36, help="of each length")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 1500, 2500])
    parser.add_argument("--rule", default="boost", help="of transfer_rules.py")
    parser.add_argument("--strength", type=float, default=10.0)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--target", default="embedded:target")
    parser.add_argument("--drafter", default="embedded:drafter")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    began = time.monotonic()
    task = task_of(options.split, options.lengths, options.items)
    items = load_items(task, None, None)
    variant = Variant(options.rule, options.strength, options.temperature)
    setup = (task, items, variant, (options.target, options.drafter))
    outcomes: list[Outcome] = []
    with multiprocessing.get_context("spawn").Pool(options.processes, _begin, setup) as pool:
        for outcome in pool.imap(_answer, range(len(items))):
            outcomes.append(outcome)
            left = (time.monotonic() - began) / len(outcomes) * (len(items) - len(outcomes))
            sys.stderr.write(f"\r{len(outcomes)} of {len(items)}, {left / 60:.1f} min left ")
    settings = {name: str(value) for name, value in vars(options).items()}
    report = {"settings": settings, **circumstances(), "table": table(outcomes).splitlines()}
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"triggered-retrieval-{options.split}"
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    stem.with_suffix(".md").write_text(table(outcomes))
    sys.stdout.write("\n" + table(outcomes))


if __name__ == "__main__":
    main()
