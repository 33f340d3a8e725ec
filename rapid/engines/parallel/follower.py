"""The process that holds one part of a model: ``python -m rapid.engines.parallel.follower FD``.

It is started by `rapid.engines.parallel.gang`, and ends with the thread that started it, whatever
it does by then: even one that was stopped is killed by the kernel, and no orphan keeps a GPU.
Torch, which takes seconds to import, comes after that is arranged.
"""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # of prctl in Linux: the signal for the parent's end


def end_with_starter() -> None:
    """Have the kernel kill this process when the thread that started it ends (Linux alone).

    Elsewhere the process ends when it reads the end of its orders, which one that is stopped does
    not.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


if __name__ == "__main__":
    end_with_starter()
    import logging
    from multiprocessing.connection import Connection

    from transformers.utils.logging import disable_progress_bar

    from rapid.engines.parallel.following import follow

    disable_progress_bar()  # the first rank shows one
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    follow(Connection(int(sys.argv[1])))
