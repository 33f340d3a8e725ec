"""Ranks of one model on several machines.

A process on each of the others calls `join`: it connects once for every rank that it is to have,
starts that rank's process as the first machine starts its own, and hands it the connection.
"""

from __future__ import annotations

import logging
import secrets
import socket
import struct
import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Protocol

from rapid.engines.parallel.starting import Process, Started, start_process
from rapid.errors import EngineFailed

logger = logging.getLogger(__name__)

_JOIN_S = 120.0  # for the ranks of all machines to connect; their nodes are reserved by then
_LOOK_S = 1.0  # between two looks whether ranks have failed
_KEY_S = 1  # for who connects to say what shows that it knows the key; others wait meanwhile
_STUCK_S = 10  # for a message to go on, in either direction; it is longer than ranks may be silent
_LOST_MS = 30_000  # until a machine is lost that takes nothing, as while its ranks load
_KEY_BYTES = 32  # of the key that ranks of other nodes must know


@dataclass(frozen=True, slots=True)
class Invitation:
    """The address, key and ranks that are given to a machine which runs some of a model's ranks."""

    host: str
    port: int  # port at which the first rank waits
    key: bytes = field(repr=False)  # what those who connect must know
    ranks: range  # the machine's ranks


class Machines(Protocol):
    """The machines of one model, which have equally many of its ranks."""

    number: int
    host: str  # address of the first, as the others reach it

    def start(self, machine: int, invitation: Invitation) -> Process:
        """Have `join` called on a machine, in a process, returned, that ends with this one."""


def start_ranks(machines: Machines, size: int) -> list[Started]:
    """Start the ranks of all machines but the first, and return them, or raise EngineFailed."""
    each = size // machines.number
    key = secrets.token_bytes(_KEY_BYTES)
    processes: dict[int, Process] = {}
    try:
        with listening(machines.host) as door:
            for machine in range(1, machines.number):
                ranks = range(machine * each, (machine + 1) * each)
                invitation = Invitation(machines.host, door.getsockname()[1], key, ranks)
                processes |= dict.fromkeys(ranks, machines.start(machine, invitation))
            pipes = _admit(door, key, processes)
    except BaseException:
        for process in processes.values():
            process.kill()
        raise
    return [(process, pipes[rank]) for rank, process in processes.items()]


def join(invitation: Invitation) -> None:
    """Start the ranks that a machine is invited to have; return when all have ended.

    They end with the thread that calls this.

    Raises:
        OSError: The first rank cannot be reached.
        AuthenticationError: One of both does not know the key.
    """
    processes = []
    try:
        for rank in invitation.ranks:
            address = invitation.host, invitation.port
            with socket.create_connection(address, timeout=_STUCK_S) as connected:
                pipe = _pipe(connected)
            answer_challenge(pipe, invitation.key)
            deliver_challenge(pipe, invitation.key)
            pipe.send(rank)
            processes.append(start_process(pipe))
        for process in processes:
            process.wait()
    finally:
        for process in processes:
            process.kill()
            process.wait()


def listening(host: str) -> socket.socket:
    """Return a socket that listens at one address of this machine, and at no other."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family)


def _admit(
    door: socket.socket, key: bytes, processes: Mapping[int, Process]
) -> dict[int, Connection]:
    """Return the connection of every rank that is to come."""
    pipes: dict[int, Connection] = {}
    door.settimeout(_LOOK_S)
    until = time.monotonic() + _JOIN_S
    while len(pipes) < len(processes):
        if time.monotonic() > until:
            raise EngineFailed(
                f"The ranks of other machines did not connect to {door.getsockname()[0]} within "
                f"{_JOIN_S:g} s."
            )
        try:
            caller, address = door.accept()
        except TimeoutError:
            _check_started(processes.values())
            continue
        with caller:
            pipe = _pipe(caller)
            _wait_for_messages(caller, _KEY_S)
            try:
                deliver_challenge(pipe, key)
                _wait_for_messages(caller, _STUCK_S)
                answer_challenge(pipe, key)
                rank = pipe.recv()
            except (AuthenticationError, AssertionError, EOFError, OSError):
                logger.warning("%s is not admitted: it does not know the key", address[0])
                pipe.close()
                continue
        pipes[rank] = pipe
    return pipes


def _check_started(processes: Iterable[Process]) -> None:
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(0)
            raise EngineFailed("Another machine of the model could not start its ranks.")


def _pipe(connected: socket.socket) -> Connection:
    """Return a connection over a socket of its own, which fails where a message stays stuck."""
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_MS)
    _wait_for_messages(connected, _STUCK_S)
    return Connection(connected.dup().detach())


def _wait_for_messages(connected: socket.socket, seconds: int) -> None:
    """Let a message take so long to go on; it holds for all connections over the socket."""
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))
