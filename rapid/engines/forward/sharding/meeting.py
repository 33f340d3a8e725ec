"""The places where the ranks of a model find each other, before they connect and compute."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import distributed as _distributed

_LOOPBACK = "lo"
distributed: Any = _distributed  # whose classes torch does not export by name


@dataclass(frozen=True, slots=True)
class InFile:
    """For ranks of one machine, which talk over its loopback."""

    path: str  # a file that none of them has used yet, in a directory that exists

    def store(self, size: int, timeout: timedelta) -> Any:
        """Return torch's store of what ranks tell each other to connect."""
        return distributed.FileStore(self.path, size)

    def device(self) -> Any:
        """Return gloo's device, at which the others reach this rank."""
        return distributed.ProcessGroupGloo.create_device(interface=_LOOPBACK)


@dataclass(frozen=True, slots=True)
class AtAddress:
    """Meeting place of ranks on several machines: a store that the first rank has opened."""

    host: str  # address of the first rank's machine
    port: int  # port of the store that the first rank has opened (`open_store`)

    def store(self, size: int, timeout: timedelta) -> Any:
        """Return torch's store of what ranks tell each other to connect."""
        return distributed.TCPStore(self.host, self.port, size, timeout=timeout)

    def device(self) -> Any:
        """Return gloo's device, at which the others reach this rank."""
        return distributed.ProcessGroupGloo.create_device(hostname=self._own_address())

    def _own_address(self) -> str:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((self.host, self.port))  # nothing is sent: it asks for the route
            address: str = probe.getsockname()[0]
        return address


Meeting = InFile | AtAddress


def open_store(door: socket.socket) -> Any:
    """Open a store at a socket that listens, for `AtAddress`; it closes with the object."""
    host, port = door.getsockname()[:2]
    return distributed.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=door.detach()
    )
