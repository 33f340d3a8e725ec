"""The processes of the other ranks, as the first one starts, tells, hears and ends them."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler

from rapid.engines.parallel.orders import BEAT_S, Answer, Beat, Done, End, Loaded, Order
from rapid.engines.parallel.starting import Process, Started
from rapid.errors import EngineFailed

logger = logging.getLogger(__name__)

_END_S = 5.0  # for a follower to end by itself
_MOST_SILENT = 10  # beats that a follower may leave out, while this process gets to listen
_ENDED = "a process that holds a part of its model has ended"
_SILENT = "a process that holds a part of its model does not answer"

OnLost = Callable[[str], None]


@dataclass(eq=False, slots=True)
class _Member:
    """A follower."""

    process: Process  # its process, or those of its machine
    pipe: Connection  # what it reads orders from, and answers through
    loaded: Future[Loaded] = field(default_factory=Future)
    num_silent: int = 0  # beats since it was heard, counted once it has loaded


class Followers:
    """The followers of one model, and a thread that starts them and hears what they say."""

    def __init__(self, start: Callable[[], Iterable[Started]]) -> None:
        """Start the processes, as `start` does, in the order of their ranks."""
        self.on_lost: dict[int, OnLost] = {}  # by the number of the engine
        self.is_broken = False  # then ranks may be out of step, and nothing more is computed
        self.most_silent = _MOST_SILENT
        self._members: list[_Member] = []
        self._is_ending = False
        self._sending = threading.Lock()
        self._guard = threading.Lock()
        self._asked: dict[int, tuple[Future[bool], list[bool]]] = {}
        started: Future[None] = Future()
        # A follower dies with the thread that started it, so this one stays until all have ended.
        threading.Thread(
            target=self._run, args=[start, started], name="rapid-followers", daemon=True
        ).start()
        started.result()

    @property
    def loaded(self) -> list[Future[Loaded]]:
        """The futures of the followers' reports that they have loaded, in the order of ranks."""
        return [member.loaded for member in self._members]

    def tell(self, orders: Sequence[Order]) -> None:
        """Give each follower an order, or raise EngineFailed if one is gone."""
        self._send([ForkingPickler.dumps(order) for order in orders])

    def tell_all(self, order: Order) -> None:
        """Give every follower the same order, which is pickled once; see `tell`."""
        self._send([ForkingPickler.dumps(order)] * len(self._members))

    def _send(self, messages: Sequence[memoryview]) -> None:
        try:
            with self._sending:
                for member, message in zip(self._members, messages, strict=True):
                    member.pipe.send_bytes(message)
        except OSError as error:
            raise EngineFailed("A process that holds a part of the model is gone.") from error

    def ask(self, number: int, order: Order) -> Future[bool]:
        """Give all an order, to be answered by `Done(number, ...)`; return if all goes well."""
        answer: Future[bool] = Future()
        with self._guard:
            if self.is_broken or self._is_ending:
                answer.set_result(False)
                return answer
            self._asked[number] = answer, []
        with contextlib.suppress(EngineFailed):  # who hears that it is gone gives the answer
            self.tell_all(order)
        return answer

    def lose(self, why: str) -> None:
        """Close the engines of the model."""
        with self._guard:
            self.is_broken = True
        self._answer_asked()
        for on_lost in list(self.on_lost.values()):
            on_lost(why)

    def end(self) -> None:
        """Tell the followers to end, and kill those that do not, or that may not read any more."""
        with self._guard:
            self._is_ending = True
        if not self.is_broken:
            with contextlib.suppress(EngineFailed):
                self.tell_all(End())
        for member in self._members:
            if self.is_broken:
                member.process.kill()
            try:
                member.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()

    # --- on the thread ----------------------------------------------------------------------------

    def _run(self, start: Callable[[], Iterable[Started]], started: Future[None]) -> None:
        try:
            for process, pipe in start():
                self._members.append(_Member(process, pipe))
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        threading.Thread(target=self._beat, name="rapid-beats", daemon=True).start()
        why = self._hear()
        if not self._is_ending:
            self.lose(why)
        self._answer_all(why)
        for member in self._members:
            member.process.wait()
            member.pipe.close()

    def _beat(self) -> None:
        """Say that this process lives; on a thread of its own, as what is full keeps it waiting."""
        while not (self._is_ending or self.is_broken):
            time.sleep(BEAT_S)
            with contextlib.suppress(EngineFailed):  # who hears that it is gone breaks the loop
                self.tell_all(Beat())

    def _answer_all(self, why: str) -> None:
        """Answer for the followers, whom nobody hears any more."""
        for member in self._members:
            if not member.loaded.done():
                member.loaded.set_result(Loaded(None, why))
        self._answer_asked()

    def _answer_asked(self) -> None:
        with self._guard:
            asked = list(self._asked.values())
            self._asked.clear()
        for answer, _ in asked:
            answer.set_result(False)

    def _hear(self) -> str:
        """Take what the followers say, until one is lost; return what happened."""
        # Beats are counted by this thread's own ticks, so a process that was stopped, or gets no
        # processor, does not take the others for silent.
        members = {member.pipe: member for member in self._members}
        tick_at = time.monotonic() + BEAT_S
        while True:
            for pipe in wait(list(members), BEAT_S):
                member = members[pipe]  # type: ignore[index]
                try:
                    self._take(member, member.pipe.recv())
                except (EOFError, OSError):
                    return _ENDED
            if time.monotonic() < tick_at:
                continue
            tick_at = time.monotonic() + BEAT_S
            for member in members.values():
                member.num_silent += member.loaded.done()
                if member.num_silent > self.most_silent:
                    return _SILENT

    def _take(self, member: _Member, answer: Answer) -> None:
        member.num_silent = 0
        if isinstance(answer, Loaded):
            member.loaded.set_result(answer)
        elif isinstance(answer, Done):
            with self._guard:
                done, said = self._asked.get(answer.number, (None, []))
                said.append(answer.is_good)
                if done is None or len(said) < len(self._members):
                    return
                del self._asked[answer.number]
            done.set_result(all(said))
