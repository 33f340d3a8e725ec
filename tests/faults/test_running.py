"""The order of a fault run: what is tried, on which server, and what stops it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.faults import running
from tests.faults.breakages import Fault
from tests.faults.judgement import Run
from tests.faults.running import Report, run_all
from tests.faults.service import Sizes, grown
from tests.faults.test_judgement import TEXTS, outcome


class Script:
    """Servers that are counted, and faults whose runs are made up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **runs: Run) -> None:
        self.runs, self.num_servers = runs, 0
        self.tried: list[tuple[str, int]] = []

        async def references(clients: Any) -> tuple[list[str], float]:
            return TEXTS, 4.0

        async def warm_up(clients: Any) -> None:
            pass

        async def run_fault(service: Any, clients: Any, name: str, *rest: Any) -> Run:
            self.tried.append((name, service.number))
            if name not in self.runs:
                raise RuntimeError("the row itself broke")
            return self.runs[name]

        for each in (references, warm_up, run_fault):
            monkeypatch.setattr(running, each.__name__, each)

    @contextmanager
    def serving(self) -> Iterator[Any]:
        self.num_servers += 1
        yield SimpleNamespace(urls=["http://nowhere"], number=self.num_servers)


def seen(name: str, *, is_whole: bool = True) -> Run:
    return Run(name, Fault().allowed, 2.0, [outcome()], whole_again_s=3.0 if is_whole else None)


def test_a_row_that_fails_or_breaks_costs_the_server_and_no_other_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = Script(monkeypatch, a=seen("a"), b=seen("b", is_whole=False), d=seen("d"))
    report = Report(["a", "b", "c", "d"], out=tmp_path / "table.md")
    run_all(script.serving, report, {name: Fault() for name in report.names}, 1.0, 1)
    assert script.tried == [("a", 1), ("b", 1), ("c", 2), ("d", 3)]
    assert [row[-1] for row in report.rows] == ["ok", "FAILS", "FAILS", "ok"]
    assert "the row itself broke" in report.wrong["c"][0]
    assert not report.is_good
    assert "| c |" in (tmp_path / "table.md").read_text()


def test_a_fault_that_spends_the_server_or_lacks_its_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = Script(monkeypatch, a=seen("a"), c=seen("c"))
    report = Report(["a", "b", "c"])
    faults = {"a": Fault(spends=True), "b": Fault(needs="nonesuch"), "c": Fault()}
    run_all(script.serving, report, faults, 1.0, 1)
    assert script.tried == [("a", 1), ("c", 2)]
    assert report.rows[0][-1] == "not tried: there is no nonesuch here"
    assert report.is_good


def test_a_row_that_fails_is_tried_again_where_that_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = {"a": [seen("a", is_whole=False), seen("a")], "b": [seen("b", is_whole=False)] * 2}
    script = Script(monkeypatch)

    async def run_fault(service: Any, clients: Any, name: str, *rest: Any) -> Run:
        script.tried.append((name, service.number))
        return runs[name].pop(0)

    monkeypatch.setattr(running, "run_fault", run_fault)
    report = Report(["a", "b"])
    run_all(script.serving, report, {"a": Fault(), "b": Fault()}, 1.0, 1, num_tries=2)
    assert script.tried == [("a", 1), ("a", 2), ("b", 2), ("b", 3)]
    assert [row[-1] for row in report.rows] == ["FAILS", "ok", "FAILS", "FAILS"]
    assert not report.wrong["a"]
    assert not report.is_good


def test_growth_is_that_of_processes_which_were_there_all_along() -> None:
    before: Sizes = {"Target engine": {1: (2**20, 5), 2: (2**20, 5)}}
    halfway: Sizes = {"Target engine": {1: (3 * 2**20, 6)}}
    after: Sizes = {"Target engine": {1: (4 * 2**20, 6), 9: (2**20, 5)}}
    assert grown(before, halfway, after) == [("Target engine", [1.0, 3.0, 4.0], [5, 6, 6])]
