"""Ports of loopback for servers that tests start."""

from __future__ import annotations

import random
import socket

# Below those that Linux (32768 to 60999) and others (49152 to 65535) give to clients, and above
# those of Ray's workers. A client that waits for a server at a port of theirs is given that same
# port as its own now and then; it is then connected with itself, and the server finds it taken.
_PORTS = range(20_000, 32_768)


def free_port() -> int:
    """Return a port of loopback that nobody uses, for a server that is started later."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
