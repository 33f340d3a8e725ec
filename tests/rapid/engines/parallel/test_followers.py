"""Stories of followers that end, with threads in place of processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from rapid.engines.parallel import followers
from rapid.engines.parallel.followers import Followers
from rapid.engines.parallel.orders import End, Loaded

PATIENCE_S = 60.0


class FakeProcess:
    """Counts as running until its pipe is closed on the other side."""

    def __init__(self) -> None:
        self.has_ended = threading.Event()

    def wait(self, timeout: float | None = None) -> None:
        self.has_ended.wait(timeout or PATIENCE_S)

    def kill(self) -> None:
        self.has_ended.set()


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[FakeProcess, Connection]]]:
    """The other side of each follower, in the order of their ranks."""
    made: list[tuple[FakeProcess, Connection]] = []

    def started() -> tuple[FakeProcess, Connection]:
        ours, other = Pipe()
        made.append((FakeProcess(), other))
        return made[-1][0], ours

    monkeypatch.setattr(followers, "_started", started)
    yield made
    for process, pipe in made:
        pipe.close()
        process.kill()


def end(process: FakeProcess, pipe: Connection) -> None:
    pipe.close()
    process.kill()


def test_who_waits_for_all_to_load_hears_of_one_that_ends_after_it_has_loaded(
    theirs: list[tuple[FakeProcess, Connection]],
) -> None:
    ranks = Followers(2)
    first, second = ranks.loaded
    theirs[0][1].send(Loaded("files", None))
    assert first.result(PATIENCE_S).error is None
    end(*theirs[0])
    assert "has ended" in str(second.result(PATIENCE_S).error)
    assert ranks.is_broken


def test_nothing_that_is_asked_around_the_end_stays_unanswered(
    theirs: list[tuple[FakeProcess, Connection]],
) -> None:
    ranks = Followers(1)
    asked = ranks.ask(1, End())
    threading.Thread(target=ranks.end).start()
    process, pipe = theirs[0]
    assert isinstance(pipe.recv(), End)
    end(process, pipe)
    assert asked.result(PATIENCE_S) is False
    assert ranks.ask(2, End()).result(PATIENCE_S) is False
