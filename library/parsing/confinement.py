"""What takes rights from the process that reads an uploaded file.

On Linux on x86-64 and ARM64 the kernel refuses, by seccomp, what no reader needs: sockets, other
programs, other processes. That needs no privilege, holds for native code, and cannot be undone.
Elsewhere, or where seccomp is refused, only Python's own sockets are. Either way the kernel bounds
memory, computing, time and open files, and the size of files written is 0. Files that the user of
the service may read can be opened: give it no more than it needs.
"""

from __future__ import annotations

import _socket
import ctypes
import errno
import os
import resource
import signal
import socket
import struct
import sys
from typing import Any, NoReturn

from library.parsing.parsing_limits import ParsingLimits

_OPEN_FILES = 32  # the file, three pipes, and the modules and libraries that Python loads
_LIVES_AFTER_S = 1  # seconds after its caller should have ended it that the kernel does
_NICENESS = 10  # answers go before uploads

_DIE_WITH_PARENT, _SECCOMP, _NO_NEW_PRIVILEGES, _FILTER = 1, 22, 38, 2  # of linux/prctl.h
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM  # of linux/seccomp.h
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # of linux/bpf_common.h
_OTHER_ABI = 0x40000000  # from here numbers are x32's
# socket, socketpair, connect, clone, fork, vfork, execve, ptrace, kill, tkill, tgkill,
# rt_sigqueueinfo, process_vm_readv and _writev, prlimit64, execveat, pidfd_send_signal,
# io_uring_setup, pidfd_open, clone3, pidfd_getfd; ARM64 has no fork.
_CALLS = {
    "x86_64": (
        0xC000003E,
        *(41, 53, 42, 56, 57, 58, 59, 101, 62, 200, 234, 129, 310, 311, 302, 322),
        *(424, 425, 434, 435, 438),
    ),
    "aarch64": (
        0xC00000B7,
        *(198, 199, 203, 220, 221, 117, 129, 130, 131, 138, 270, 271, 261, 281),
        *(424, 425, 434, 435, 438),
    ),
}


def confine(limits: ParsingLimits) -> None:
    """Take from this process what reading a file does not need."""
    os.nice(_NICENESS)
    signal.setitimer(signal.ITIMER_REAL, limits.wall_s + _LIVES_AFTER_S)
    for which, most in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))
    if not _refuse_calls():
        _socket.socket = socket.socket = _refuse_socket  # type: ignore[misc,assignment]


def _refuse_calls() -> bool:
    """Have the kernel refuse `_CALLS` with EPERM; return whether it will."""
    arch, *calls = _CALLS.get(os.uname().machine, (0,))
    if sys.platform != "linux" or not arch or sys.maxsize < 1 << 32:
        return False
    refuse = len(calls) + 1  # instructions from the first comparison to the refusal
    program = [
        _instruct(_LOAD, 4),  # the architecture
        _instruct(_EQUAL, arch, otherwise=refuse + 2),
        _instruct(_LOAD, 0),  # the number of the call
        _instruct(_AT_LEAST, _OTHER_ABI, then=refuse),
        *(_instruct(_EQUAL, call, then=refuse - 1 - at) for at, call in enumerate(calls)),
        _instruct(_RETURN, _ALLOW),
        _instruct(_RETURN, _REFUSE),
    ]
    code = ctypes.create_string_buffer(b"".join(program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    return bool(prctl(_SECCOMP, _FILTER, ctypes.addressof(header), 0, 0) == 0)


def _instruct(code: int, operand: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    """Return an instruction; `then` and `otherwise` are how many it skips."""
    return struct.pack("HBBI", code, then, otherwise, operand)


def _refuse_socket(*_: Any, **__: Any) -> NoReturn:
    raise PermissionError(errno.EPERM, "A process that reads uploaded files has no network.")
