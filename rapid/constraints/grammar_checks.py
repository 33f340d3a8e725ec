"""The checking of grammars by llguidance, in a process that may be ended.

A text of a kilobyte can make the library compute for minutes, or take all memory, in code that
nothing interrupts. So each process that checks grammars has another one for that, which ends itself
at such a text, as at the end of its parent, and is begun again.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import cache, lru_cache
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

_CPU_S = 0.5  # 900 properties take 0.07 s, and an engine takes up to thrice the time
_MEMORY = 2**28  # bytes of the checking process, which has 28 MB before it checks anything
_MOST_KEPT = 256  # findings, for requests that have the same grammar again: each has 32 KiB at most
TOO_COMPLEX = f"is too complex: it takes more than {_CPU_S:g} s, or too much memory, to be compiled"


@cache
def find_limits() -> LLParserLimits:
    """Return what a grammar may take of llguidance, at the door as in an engine."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        # 400 dates take less than 100,000, and 350 numbers between bounds of 20 digits more than
        # 250,000; the usual million was up to 6 s of an engine and 350 MB.
        initial_lexer_fuel=500_000,
        max_grammar_size=50_000,  # symbols: 900 properties have less than 20,000
        # Of all answers together that have a copy of the grammar, until they go on with their own.
        # A token of a text whose characters are counted takes about eight; a state has 1.4 KB.
        max_lexer_states=2**15,
        verbose_errors=False,  # whose text would be a grammar's
    )


def find_fault(grammar: str) -> str:
    """Return why llguidance cannot follow a grammar, or `TOO_COMPLEX`; nothing where it can.

    Raises:
        RuntimeError: The checking process cannot be started.
    """
    return measure_fault(grammar)[0]


@lru_cache(_MOST_KEPT)
def measure_fault(grammar: str) -> tuple[str, float]:
    """Return what `find_fault` does, and the seconds of a CPU that it took; errors as there."""
    return _CHECKS.ask(grammar)


class _Checks:
    """The process that checks grammars, one after the other, for all threads of this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, grammar: str) -> tuple[str, float]:
        with self._lock:
            given, told = self._open()
            try:
                given.write(json.dumps(grammar).encode() + b"\n")
                given.flush()
                finding = told.readline()
            except BrokenPipeError:
                finding = b""
            if not finding:
                self.stop()
                return TOO_COMPLEX, _CPU_S
            fault, cpu_s = json.loads(finding)
            return fault, cpu_s

    def _open(self) -> tuple[IO[bytes], IO[bytes]]:
        process = self._process
        if process is None or process.poll() is not None:
            self.stop()
            process = self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # where the library tells of each text that it gave up
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )
            assert process.stdout is not None
            if not process.stdout.readline():
                raise RuntimeError(f"`{sys.executable} -m {__name__}` cannot be started")
        assert process.stdin is not None
        assert process.stdout is not None
        return process.stdin, process.stdout

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def leave(self) -> None:
        """Give up the process to the one that has begun it, of which this one is a fork."""
        self._lock, self._process = threading.Lock(), None


_CHECKS = _Checks()
atexit.register(_CHECKS.stop)
os.register_at_fork(after_in_child=_CHECKS.leave)


def check_lines() -> None:
    """Answer each line of the input, a grammar, by a line, which says what is wrong with it."""
    from llguidance import LLMatcher

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the parent's children
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # whatever the parent has inherited or set
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    with suppress(ValueError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(flush=True)  # noqa: T201 (what the parent reads)
    for line in sys.stdin:
        grammar = json.loads(line)
        begun_at = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, _CPU_S)  # at which the system ends this process
        _, findings = LLMatcher.validate_grammar_with_warnings(grammar, limits=find_limits())
        signal.setitimer(signal.ITIMER_PROF, 0)
        told = _say_shortly(findings[0]) if findings else "", time.process_time() - begun_at
        print(json.dumps(told), flush=True)  # noqa: T201


def _say_shortly(finding: str) -> str:
    lines = [line.strip() for line in finding.splitlines() if line.strip()]
    # A parser of regular expressions shows the place first and says the reason last.
    reasons = (line.removeprefix("error: ") for line in lines if line.startswith("error: "))
    return next(reasons, lines[0])


if __name__ == "__main__":
    check_lines()
