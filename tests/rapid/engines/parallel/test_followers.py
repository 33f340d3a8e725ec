"""Stories of followers that end, with threads in place of processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from rapid.engines.parallel.followers import Followers
from rapid.engines.parallel.orders import Beat, End, Loaded
from rapid.engines.parallel.starting import Started

PATIENCE_S = 60.0


class FakeProcess:
    """Counts as running until its pipe is closed on the other side."""

    def __init__(self) -> None:
        self.has_ended = threading.Event()

    def wait(self, timeout: float | None = None) -> None:
        self.has_ended.wait(timeout or PATIENCE_S)

    def kill(self) -> None:
        self.has_ended.set()


class Ranks:
    """Fake processes.

    Attributes:
        theirs: The other side of each, in the order of their ranks.
    """

    def __init__(self) -> None:
        self.theirs: list[tuple[FakeProcess, Connection]] = []

    def start(self, number: int) -> list[Started]:
        started: list[Started] = []
        for _ in range(number):
            ours, other = Pipe()
            self.theirs.append((FakeProcess(), other))
            started.append((self.theirs[-1][0], ours))
        return started


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    for process, pipe in ranks.theirs:
        end(process, pipe)


def end(process: FakeProcess, pipe: Connection) -> None:
    pipe.close()
    process.kill()


def test_who_waits_for_all_to_load_hears_of_one_that_ends_after_it_has_loaded(
    ranks: Ranks,
) -> None:
    followers = Followers(lambda: ranks.start(2))
    first, second = followers.loaded
    ranks.theirs[0][1].send(Loaded("files", None))
    assert first.result(PATIENCE_S).error is None
    end(*ranks.theirs[0])
    assert "has ended" in str(second.result(PATIENCE_S).error)
    assert followers.is_broken


def test_nothing_that_is_asked_around_the_end_stays_unanswered(
    ranks: Ranks,
) -> None:
    followers = Followers(lambda: ranks.start(1))
    asked = followers.ask(1, End())
    threading.Thread(target=followers.end).start()
    process, pipe = ranks.theirs[0]
    while not isinstance(pipe.recv(), End):
        pass  # a beat
    end(process, pipe)
    assert asked.result(PATIENCE_S) is False
    assert followers.ask(2, End()).result(PATIENCE_S) is False


class Counted:
    """An order that counts how often it is pickled, and arrives as the end."""

    num_pickled = 0

    def __reduce__(self) -> tuple[type[End], tuple[()]]:
        Counted.num_pickled += 1
        return End, ()


def test_an_order_to_all_is_pickled_once(ranks: Ranks) -> None:
    Followers(lambda: ranks.start(3)).tell_all(Counted())  # type: ignore[arg-type]
    for _, pipe in ranks.theirs:
        while not isinstance(pipe.recv(), End):
            pass  # a beat
    assert Counted.num_pickled == 1


def test_all_ranks_hear_that_the_first_lives(ranks: Ranks) -> None:
    Followers(lambda: ranks.start(2))
    for _, pipe in ranks.theirs:
        assert isinstance(pipe.recv(), Beat)
