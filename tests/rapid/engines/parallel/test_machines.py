"""Ranks of one model on several machines; here these are processes of this one."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import deliver_challenge
from unittest.mock import Mock

import psutil
import pytest

from rapid.engines.engine import Engine
from rapid.engines.forward.weights import loading
from rapid.engines.parallel import following, leading, machines
from rapid.engines.parallel.leading import load_replica
from rapid.engines.parallel.machines import Invitation, join, start_ranks
from rapid.engines.parallel.orders import BEAT_S, Beat, Meet
from rapid.errors import ConfigurationError, EngineFailed
from tests.rapid.engines.parallel.conftest import followers_of
from tests.rapid.engines.parallel.test_leading import PATIENCE_S, answers
from tests.rapid.tiny_models import engine_config, lease_request, loaded

JOIN = (
    "import pickle, sys; from rapid.engines.parallel.machines import join;"
    "join(pickle.load(sys.stdin.buffer))"
)


class Processes:
    """Machines of which each but the first is a process with its ranks below it."""

    host = "127.0.0.1"

    def __init__(self, number: int = 2) -> None:
        self.number = number
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, machine: int, invitation: Invitation) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", JOIN], stdin=subprocess.PIPE)
        assert process.stdin is not None
        with process.stdin as invited:
            pickle.dump(invitation, invited)
        self.started.append(process)
        return process


async def test_two_machines_say_what_one_says_and_are_reached_at_one_address_alone() -> None:
    others = Processes()
    model = load_replica(engine_config(tensor_parallel=2), machines=others)
    try:
        (follower,) = followers_of(others.started[0].pid)
        for process in (psutil.Process(), follower):
            sockets = process.net_connections("inet")
            listening = {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}
            assert {ip.removeprefix("::ffff:") for ip in listening} == {others.host}
        settings = {"host_cache_tokens": 512}
        assert await answers(model, **settings) == await answers(loaded(), **settings)
    finally:
        assert model.followers is not None
        model.followers.close()
    assert not follower.is_running()
    assert others.started[0].returncode is not None


@pytest.mark.slow
async def test_a_machine_that_is_lost_ends_every_lease_and_leaves_no_process() -> None:
    others = Processes()
    config = engine_config(tensor_parallel=2)
    model = load_replica(config, machines=others)
    (follower,) = followers_of(others.started[0].pid)
    engine = Engine(model, config)
    try:
        await engine.open(lease_request("a", max_tokens=200))
        await engine.prefill("a")
        others.started[0].kill()
        await engine.wait_closed("a")
        with pytest.raises(EngineFailed, match="closed"):
            await engine.decode("a", 0, 1)
        follower.wait(PATIENCE_S)
    finally:
        engine.close()
        assert model.followers is not None
        model.followers.close()


@pytest.mark.slow
async def test_four_ranks_on_two_machines() -> None:
    others = Processes()
    num_before = len(followers_of(os.getpid()))  # of a model that other tests share
    config = engine_config("qwen3", tensor_parallel=4)
    model = load_replica(config, machines=others)
    try:
        assert len(followers_of(others.started[0].pid)) == 2
        assert len(followers_of(os.getpid())) == num_before + 3
        assert await answers(model) == await answers(loaded("qwen3"))
    finally:
        assert model.followers is not None
        model.followers.close()


def test_a_machine_is_asked_for_the_memory_of_its_own_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked = Mock(side_effect=ConfigurationError("checked"))
    monkeypatch.setattr(loading, "check_memory", checked)
    monkeypatch.setattr(leading, "Gang", lambda *_: Mock(size=4))
    with pytest.raises(ConfigurationError, match="checked"):
        load_replica(engine_config("qwen3", tensor_parallel=4), machines=Processes(2))
    assert checked.call_args.kwargs["num_machines"] == 2


class Thread(threading.Thread):
    """A machine that is a thread, which nobody can kill."""

    def wait(self, timeout: float | None = None) -> None:
        self.join(timeout)
        if self.is_alive():
            raise subprocess.TimeoutExpired("thread", timeout or 0)

    def kill(self) -> None:
        pass


class Threads:
    """Machines that are threads, which do with their invitations what a test says."""

    host = "127.0.0.1"
    number = 2

    def __init__(self, do: Callable[[Invitation], object]) -> None:
        self._do = do

    def start(self, machine: int, invitation: Invitation) -> Thread:
        thread = Thread(target=self._do, args=[invitation])
        thread.start()
        return thread


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the ranks that would be processes of another machine read first, in their order."""
    orders: list[object] = []

    def started(pipe: machines.Connection) -> Thread:
        thread = Thread(target=lambda: orders.append(pipe.recv()))
        thread.start()
        return thread

    monkeypatch.setattr(machines, "start_process", started)
    return orders


def test_who_does_not_know_the_key_is_not_admitted(told: list[object]) -> None:
    def come(invitation: Invitation) -> None:
        with pytest.raises(AuthenticationError):
            join(replace(invitation, key=b"guessed"))
        with socket.create_connection((invitation.host, invitation.port)):
            pass  # who says nothing at all
        join(invitation)

    ranks = start_ranks(Threads(come), 4)
    for number, (_, pipe) in enumerate(ranks):
        pipe.send(f"rank {2 + number}")
    for process, _ in ranks:
        process.wait(PATIENCE_S)
    assert sorted(map(str, told)) == ["rank 2", "rank 3"]


def option_of(pipe: machines.Connection, level: int, option: int, form: str) -> int:
    """An option of the socket below a connection; the first number of its structure."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as below:
        value: int = struct.unpack(form, below.getsockopt(level, option, struct.calcsize(form)))[0]
        return value


def test_who_is_silent_at_the_door_holds_up_the_others_for_a_second(
    monkeypatch: pytest.MonkeyPatch, told: list[object]
) -> None:
    """And whoever has shown the key may take as long as a rank may."""
    waits, wait = [], (socket.SOL_SOCKET, socket.SO_RCVTIMEO, "ll")

    def ask(pipe: machines.Connection, key: bytes) -> None:
        waits.append(option_of(pipe, *wait))
        deliver_challenge(pipe, key)

    monkeypatch.setattr(machines, "deliver_challenge", ask)

    def come(invitation: Invitation) -> None:
        with socket.create_connection((invitation.host, invitation.port)):
            join(invitation)

    ((process, pipe),) = start_ranks(Threads(come), 2)
    pipe.send("go")
    process.wait(PATIENCE_S)
    assert told == ["go"]
    assert sorted(waits) == [1, 1, 10]  # at the door twice; a rank asks the first one, too
    assert option_of(pipe, *wait) == 10


def test_a_machine_that_takes_nothing_is_lost_before_the_kernel_gives_it_up(
    told: list[object],
) -> None:
    """As while its ranks load, when the first rank does not expect to hear them."""
    ((process, pipe),) = start_ranks(Threads(join), 2)
    assert option_of(pipe, socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, "i") == 30_000
    pipe.send("go")
    process.wait(PATIENCE_S)


def test_a_machine_that_ends_before_its_ranks_have_come_is_noticed() -> None:
    with pytest.raises(EngineFailed, match="could not start its ranks"):
        start_ranks(Threads(lambda invitation: None), 2)


def test_ranks_that_never_come_are_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machines, "_JOIN_S", 0.0)
    is_over = threading.Event()
    with pytest.raises(EngineFailed, match=r"did not connect to 127\.0\.0\.1"):
        start_ranks(Threads(lambda invitation: is_over.wait(PATIENCE_S)), 2)
    is_over.set()


class Silent:
    """A connection as on a machine whose network to the first is gone: none ends there.

    Attributes:
        waits: Beats without a word, before each message and after the last.
    """

    def __init__(self, messages: list[tuple[int, object]]) -> None:
        self.waits = [0]
        self._messages = messages

    def poll(self, timeout: float) -> bool:
        if self._messages and self.waits[-1] == self._messages[0][0]:
            return True
        self.waits[-1] += 1
        return False

    def recv(self) -> object:
        self.waits.append(0)
        return self._messages.pop(0)[1]


JOINING = int(machines._JOIN_S / BEAT_S)  # beats that the other machines may take to come


@pytest.mark.parametrize(
    ("messages", "last"),
    [
        ([(JOINING, Meet())], following._MOST_SILENT + 1),
        ([(JOINING, Meet()), (following._MOST_SILENT, Beat())], following._MOST_SILENT + 1),
        ([], following._MOST_UNTOLD + 1),
    ],
)
def test_a_rank_ends_when_the_first_has_said_nothing_for_long(
    monkeypatch: pytest.MonkeyPatch, messages: list[tuple[int, object]], last: int
) -> None:
    """Until the ranks of all machines have joined, the first has nothing to say."""
    has_ended = threading.Event()
    monkeypatch.setattr(following.os, "_exit", lambda status: has_ended.set())
    waits = [number for number, _ in messages]
    orders = following._orders(pipe := Silent(list(messages)))  # type: ignore[arg-type]
    assert has_ended.wait(PATIENCE_S)
    assert pipe.waits == [*waits, last]
    assert orders.qsize() == sum(isinstance(order, Meet) for _, order in messages)
