"""The process that holds one part of a model: ``python -m rapid.engines.parallel.follower FD``.

`rapid.engines.parallel.gang` starts it; the kernel kills it when the thread that started it ends.
"""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # of prctl in Linux: the signal for the parent's end


def end_with_starter() -> None:
    """Have the kernel kill this process when the thread that started it ends (Linux alone)."""
    # Elsewhere it ends when it reads the end of its orders, which one that is stopped does not.
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
