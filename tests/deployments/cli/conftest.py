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
import http.server, os, signal, subprocess, sys, threading, yaml
print("stand-in says: hello", *sys.argv[2:], flush=True)
config = yaml.safe_load(open(sys.argv[1]))
if len(open(".run/serve.log").read().splitlines()) < 2 * config.get("late", 0):
    print("Ray did not start: The current node timed out during startup.", flush=True)
    sys.exit(os.EX_TEMPFAIL)
if "state" in config:
    open(".run/serve.json", "w").write(config["state"])
if "raylet" in config:  # it has a worker, which lives on
    open(".run/serve.json", "w").write('{{"dashboard": "", "pools": {{}}}}')
    worker = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    worker += "os.setpgrp(); print(os.getpid(), flush=True); time.sleep(600)"
    raylet = "import subprocess, sys, time; subprocess.Popen([sys.argv[1], '-c', sys.argv[2]]);"
    raylet += "time.sleep(600)"
    subprocess.Popen([config["raylet"], "-S", "-c", raylet, sys.executable, worker])
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
    monkeypatch.setattr("deployments.cli.server.server_process.SERVE_COMMAND", (str(script),))
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
