"""Runs whose lines are made by hand, and the parts of their pages."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from evaluation.results import Log, Result
from evaluation.systems import BASELINES
from evaluation.tasks import Condition, Task

SHAPE = {
    "layers": 2,
    "hidden": 8,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 4,
    "intermediate": 16,
    "vocabulary": 32,
}


def task(*systems: str, conditions: Iterable[Condition] = (Condition(),)) -> Task:
    return Task.model_validate(
        {
            "name": "small",
            "description": "Hand-made lines",
            "source": {"loader": "generated"},
            "metrics": ["exact"],
            "groups": ["length", "kind"],
            "systems": systems,
            "conditions": [each.model_dump() for each in conditions],
        }
    )


def configuration(of: Task, **more: object) -> dict[str, object]:
    return {
        "task": of.model_dump(mode="json", exclude={"systems", "conditions"}),
        "systems": [each.model_dump(mode="json") for each in of.systems],
        "conditions": [each.model_dump(mode="json") for each in of.conditions],
        "models": {"target": {"model": "t", "shape": SHAPE}},
        "server": None,
        "settings": {"batch": 1, "workers": 1},
        "made": {"date": "2000-01-01", "commit": "abc"},
    } | more


def result(number: int, system: str, score: float, condition: str = "as is", **more) -> Result:
    is_drafted = system in BASELINES and BASELINES[system].is_drafted
    judged = ((more.get("rounds", 10), 0),) if is_drafted else ()
    return Result(
        item=f"item-{number}",
        system=system,
        condition=condition,
        scores={"exact": score},
        **{
            "groups": {"length": "500" if number % 2 else "1000", "kind": "fact"},
            "context_tokens": 500,
            "retrieved_tokens": 100,
            "tokens": 10,
            "rounds": 10,
            "by_position": judged,
            "ms": {"decode": 100.0, "target_prefill": 50.0},
        }
        | more,
    )


def run_dir(path: Path, of: Task, results: Iterable[Result], **more: object) -> Path:
    with Log(path / "results.jsonl", configuration(of, **more)) as log:
        for each in results:
            log.append(each)
    return path


def section(page: str, title: str) -> str:
    return page.split(f"## {title}\n")[1].split("\n## ")[0]


def row(text: str, system: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {system} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]
