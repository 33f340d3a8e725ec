"""A stand-in for the process of Serve with its configuration, and a small task to evaluate."""

from __future__ import annotations

import socket
import stat
import sys
from pathlib import Path

import pytest
import yaml

from tests.evaluation.tiny_task import SETTINGS

STAND_IN = """\
#!{python}
import http.server, signal, sys, threading, yaml
print("stand-in says: hello", flush=True)
config = yaml.safe_load(open(sys.argv[1]))
if "fails" in config:
    sys.exit(config["fails"])
if "gives_up" in config:
    print("rapid.errors.EngineFailed: No memory.", flush=True)
    print("(Controller pid=1) ERROR -- Failed to update the deployments ['Target'].", flush=True)
STATES = config.get("states", ['{{"ready": true}}'])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(STATES.pop(0).encode())
        STATES[:] = STATES or ['{{"ready": true}}']
    def log_message(self, *args): pass
server = http.server.HTTPServer(("127.0.0.1", config["http_options"]["port"]), Handler)
try:
    server.serve_forever(poll_interval=0.05)
except KeyboardInterrupt:
    print("stand-in says: bye", flush=True)
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration for the stand-in, which takes the place of Ray Serve."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "serve"
    script.write_text(STAND_IN.format(python=sys.executable))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr("deployments.cli.server_process.SERVE_COMMAND", (str(script),))
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    path = tmp_path / "config.yaml"
    path.write_text(f"http_options: {{port: {port}}}\n")
    return path


@pytest.fixture
def task(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(SETTINGS | {"systems": ["plain", "rapid-boost"]}))
    return str(path)
