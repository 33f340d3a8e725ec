"""Addresses of a server: where its configuration says that it will be, and whether it can be."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import yaml

# The module that runs Serve, by which the processes of servers are recognized.
SERVE_MODULE = "deployments.cli.server.run_serve"
_ANY_ADDRESS = ("0.0.0.0", "::", "")


def joins_cluster() -> bool:
    """Return whether the environment names a Ray that runs, instead of one to be started here."""
    return os.environ.get("RAY_ADDRESS", "local") != "local"


def address_of(config: Path) -> tuple[str, int]:
    """Return host and port of the configured HTTP server; Serve's defaults are for all."""
    options = yaml.safe_load(config.read_text(encoding="utf-8")).get("http_options") or {}
    return options.get("host", _ANY_ADDRESS[0]), int(options.get("port", 8000))


def url_of(host: str, port: int) -> str:
    """Return the URL at which this machine reaches a server that binds to an address."""
    reached = "127.0.0.1" if host in _ANY_ADDRESS else f"[{host}]" if ":" in host else host
    return f"http://{reached}:{port}"


def _find_server(port: int) -> Path | None:
    """Return the folder from which a server of this user was started that has a port."""
    import psutil

    for process in psutil.process_iter():
        try:
            command, folder = process.cmdline(), Path(process.cwd())
            if SERVE_MODULE in command[:-1]:
                config = command[command.index(SERVE_MODULE) + 1]
                if address_of(folder / config)[1] == port:
                    return folder
        except (psutil.Error, OSError, ValueError, AttributeError, yaml.YAMLError):
            continue  # another user's, one that has ended, or whose file is gone or no mapping
    return None


def why_taken(host: str, port: int, setting: str = "http_options.port") -> str | None:
    """Return why no server can bind to an address of this machine; None if one can.

    Serve would try for ever. `setting` is where another port is set.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # A server that has just ended leaves connections behind.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and (folder := _find_server(port)) is not None:
            return (
                f"a RAPID server that was started from {folder} has {host}:{port}: end it with "
                f"`rapid stop` there, or set {setting}"
            )
        if error.errno == errno.EADDRINUSE:
            return f"something else has {host}:{port}: end it, or set {setting}"
        if joins_cluster():  # whose proxies may be on other machines
            return None
        return (
            f"{host}:{port} cannot be bound ({error.strerror}): set http_options.host to an "
            "address of this machine, and a port that you may use"
        )
    return None
