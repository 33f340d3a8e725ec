"""A comparison of retrieving again on various triggers with retrieving once.

    python -m benchmarks.method.triggered_retrieval --split dev

The drafter's context is refreshed with what retrieval finds for the question and the text so far:

* `once`: never, as in the paper;
* `rejected`: after a rejected draft, which ends a block anyway, so that nothing depends on block
  lengths;
* `twice rejected`: after the second rejection within eight tokens;
* `unsure`: before a position at which the drafter's best token has less than half of q;
* `sentence`: after every sentence, whatever was accepted, as blind refreshing would do.

All triggers depend only on the prompt, the committed text and the seed, so the sampled distribution
stays defined. Decoding is greedy, `fused` with `boost`. Only whole answers count, so it is enough
to follow the right answer's path (`right_answers.py`). The script writes
`results/triggered-retrieval-SPLIT.json` and `.md`.
"""

from __future__ import annotations

import argparse
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

from benchmarks.method.right_answers import Reader, task_of
from benchmarks.method.transfer_rules import cut, score
from benchmarks.reporting import RESULTS, settings
from evaluation.circumstances import circumstances
from evaluation.items import Item
from evaluation.loaders import load_items
from evaluation.reports.estimates import estimate_difference, mean
from evaluation.tasks import Condition, Task

TRIGGERS = ("once", "rejected", "twice rejected", "unsure", "sentence")
MAX_REFRESHES = 4
LEAST_CERTAINTY = 0.5
LEAST_DISTANCE = 3
WINDOW = 8


@dataclass(frozen=True, slots=True)
class Course:
    """The result for an item under a trigger.

    Attributes:
        is_right: Whether the answer is right.
        agreed: Share of the tokens, up to the first wrong one, that the drafter would have drafted.
        refreshes: Number of refreshes.
    """

    is_right: bool
    agreed: float
    refreshes: int


@dataclass(frozen=True, slots=True)
class Outcome:
    question: str
    found_at_first: bool
    courses: dict[str, Course]


_reader: Reader
_items: Sequence[Item]
_eta: float


def _begin(task: Task, items: Sequence[Item], models: Sequence[str], eta: float) -> None:
    global _reader, _items, _eta
    _reader, _items, _eta = Reader(task, items, models), items, eta


def _answer(number: int) -> Outcome:
    item = _items[number]
    right = _reader.right_ids(item)
    target = _reader.context_logits(item, right)
    found = _reader.retrieve(item, Condition())
    first = _reader.retrieved_logits(found, right, by_target=False)
    courses = {each: _course(each, item, right, target, first) for each in TRIGGERS}
    return Outcome(item.groups["question"], bool(found.evidence_found), courses)


def _course(
    trigger: str, item: Item, right: list[int], target: torch.Tensor, drafter: torch.Tensor
) -> Course:
    accepted: list[bool] = []
    refreshed: list[int] = []
    for position, token in enumerate(right):
        if len(refreshed) < MAX_REFRESHES and _is_due(
            trigger, drafter[position], right[:position], accepted, max(refreshed, default=0)
        ):
            refreshed.append(position)
            so_far = _reader.text_of(right[:position])
            asked = replace(item, query=f"{item.messages[-1].content} {so_far}")
            found = _reader.retrieve(asked, Condition())
            drafter = _reader.retrieved_logits(found, right, by_target=False)
        q = cut(torch.softmax(drafter[position], dim=-1)[None])
        best = int(score("sure boost", target[position][None], q, _eta).argmax())
        accepted.append(best == int(drafter[position].argmax()))
        if best != token:
            break
    is_right = len(accepted) == len(right) and best == token
    return Course(is_right, sum(accepted) / len(accepted), len(refreshed))


def _is_due(
    trigger: str, offered: torch.Tensor, so_far: list[int], accepted: list[bool], since: int
) -> bool:
    if not so_far:
        return False
    if trigger == "rejected":
        return not accepted[-1] and len(so_far) - since >= LEAST_DISTANCE
    if trigger == "twice rejected":
        recent = accepted[max(since, len(accepted) - WINDOW) :]
        return not accepted[-1] and recent.count(False) >= 2
    if trigger == "unsure":
        certainty = float(torch.softmax(offered, dim=-1).max())
        return certainty < LEAST_CERTAINTY and len(so_far) - since >= LEAST_DISTANCE
    return trigger == "sentence" and _reader.text_of(so_far[-1:]).endswith(".")


def table(outcomes: Sequence[Outcome]) -> str:
    """Tabulate right answers, also against `once`, agreement and refreshes by kind of question."""
    lines = [
        "| questions | items | trigger | right | against once | drafts agreed with | refreshes |",
        "| --- " * 7 + "|",
    ]
    groups = {
        kind: [each for each in outcomes if each.question == kind]
        for kind in sorted({each.question for each in outcomes})
    }
    groups["all"] = list(outcomes)
    groups["all, evidence not found at first"] = [o for o in outcomes if not o.found_at_first]
    for name, chosen in groups.items():
        for trigger in TRIGGERS if chosen else ():
            courses = [each.courses[trigger] for each in chosen]
            right = [float(course.is_right) for course in courses]
            value = mean(right)
            once = [float(each.courses["once"].is_right) for each in chosen]
            gain = estimate_difference(right, once)
            agreed = mean([course.agreed for course in courses]).value
            refreshes = mean([float(course.refreshes) for course in courses]).value
            lines.append(
                f"| {name} | {len(chosen)} | {trigger} "
                f"| {value.value:.3f} ({value.low:.3f}-{value.high:.3f}) "
                f"| {gain.value:+.3f} ({gain.low:+.3f} to {gain.high:+.3f}) "
                f"| {agreed:.3f} | {refreshes:.2f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--split", choices=("dev", "test"), default="test")
    parser.add_argument("--items", type=int, default=200, help="of each length")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 1500, 2500])
    parser.add_argument("--eta", type=float, default=10.0)
    parser.add_argument("--target", default="embedded:target")
    parser.add_argument("--drafter", default="embedded:drafter")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    began = time.monotonic()
    task = task_of(options.split, options.lengths, options.items)
    items = load_items(task, None, None)
    setup = (task, items, (options.target, options.drafter), options.eta)
    outcomes: list[Outcome] = []
    with multiprocessing.get_context("spawn").Pool(options.processes, _begin, setup) as pool:
        for outcome in pool.imap(_answer, range(len(items))):
            outcomes.append(outcome)
            left = (time.monotonic() - began) / len(outcomes) * (len(items) - len(outcomes))
            sys.stderr.write(f"\r{len(outcomes)} of {len(items)}, {left / 60:.1f} min left ")
    shown = table(outcomes)
    report = {"settings": settings(options), **circumstances(), "table": shown.splitlines()}
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"triggered-retrieval-{options.split}"
    (options.out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.out / f"{name}.md").write_text(
        f"# Retrieving again ({options.split} split)\n\nMade by "
        "`benchmarks/method/triggered_retrieval.py`; "
        f"boost, eta {options.eta:g}, greedy, {len(items)} items; 95 % bootstrap intervals, "
        f"differences paired by item.\n\n{shown}"
    )
    sys.stdout.write("\n" + shown)


if __name__ == "__main__":
    main()
