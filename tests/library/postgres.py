"""A PostgreSQL server of the tests, on loopback, from the machine's own package."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ports import free_port

_PLACES = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
_NOBODY = "nobody"  # PostgreSQL refuses to run as root


def _binary(name: str) -> str | None:
    found = shutil.which(name, path=os.pathsep.join([*map(str, _PLACES), os.environ["PATH"]]))
    return found and str(Path(found).resolve())


@contextmanager
def run_postgres() -> Iterator[str]:
    """Yield the URL of an empty database; its server ends with the context."""
    initdb, postgres = _binary("initdb"), _binary("postgres")
    if initdb is None or postgres is None:
        if "CI" in os.environ:
            pytest.fail("PostgreSQL is missing: install Debian's package postgresql")
        pytest.skip("PostgreSQL is not installed here (Debian: apt install postgresql)")
    folder = Path(tempfile.mkdtemp(prefix="pg"))
    user = None
    if os.geteuid() == 0:
        user = _NOBODY
        os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
    data = folder / "data"
    subprocess.run(
        [initdb, "-D", data, "-U", "rapid", "-A", "trust", "--no-sync", "-E", "UTF8"],
        user=user,
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    port = free_port()
    server = subprocess.Popen(
        [postgres, "-D", data, "-p", str(port), "-h", "127.0.0.1", "-k", str(folder), "-F"],
        user=user,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not _takes_connections(port):
            assert server.poll() is None, "PostgreSQL has ended"
        yield f"postgresql://rapid@127.0.0.1:{port}/postgres"
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(folder)


def _takes_connections(port: int) -> bool:
    ready = _binary("pg_isready")
    assert ready is not None
    return subprocess.run([ready, "-q", "-h", "127.0.0.1", "-p", str(port)]).returncode == 0
