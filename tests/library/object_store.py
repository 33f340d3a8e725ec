"""An S3 server of the tests, on loopback, which may be killed and started again over its folder."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.ports import free_port

_BUCKET = "library"
_KEY, _SECRET = "rapid", "rapid-secret"


class ObjectStore:
    """A bucket of `nanio`, a process of its own that checks signatures (github.com/apocas/nanio).

    Attributes:
        folder: The folder that keeps the bytes.
        url: The URL of its bucket.
        environment: What a client needs in its environment.
    """

    def __init__(self, folder: Path) -> None:
        (folder / _BUCKET).mkdir(parents=True)
        self._port = free_port()
        self.folder, self.url = folder, f"s3://{_BUCKET}"
        self.environment = {
            "AWS_ENDPOINT": f"http://127.0.0.1:{self._port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": _KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET,
        }
        self._server: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return when it takes connections."""
        at = ["--host", "127.0.0.1", "--port", str(self._port), "--data-dir", str(self.folder)]
        quiet = ["--log-level", "error", "--no-access-log"]
        keys = {"NANIO_ACCESS_KEY": _KEY, "NANIO_SECRET_KEY": _SECRET}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "nanio", "serve", *at, *quiet], env=os.environ | keys
        )
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port)).close()
                return
            except OSError:
                assert self._server.poll() is None, "the S3 server has ended"
                time.sleep(0.05)

    def kill(self) -> None:
        """Kill it, whatever it is doing; its folder stays."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None
