"""Every query of the dashboard and of the alerts, run by a real Prometheus on loopback.

    python -m tests.dashboard      # half a minute; needs `prometheus`, a package of Debian

A server of this process shows every series that `deployments.metrics` defines, with counters that
grow. Prometheus scrapes it twice, loads the rules of the alerts, and must answer each query with
at least one series.
"""

from __future__ import annotations

import argparse
import http.server
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import yaml

from deploy.watching import ALERTS, MetricDefinition, list_metrics, list_queries
from tests.ports import free_port

_PATIENCE_S = 60.0  # a busy machine starts Prometheus and scrapes it within seconds
# Values with which the alerts' selections find something, by label.
_VALUES = {
    "outcome": ("ok", "refused", "failed"),
    "cause": ("server full", ""),
    "reason": ("target lost", "drafter lost"),
    "mode": ("fused",),
    "pool": ("target", "drafter"),
}


def show(definitions: list[MetricDefinition], number: int) -> str:
    """Return the series of all metrics in Prometheus' form, of which counters stand at `number`."""
    lines: list[str] = []
    for each in definitions:
        lines.append(f"# TYPE {each.name} {each.kind}")
        values = [_VALUES.get(label, ("any",)) for label in each.labels]
        for chosen in itertools.product(*values):
            pairs = [f'{key}="{value}"' for key, value in zip(each.labels, chosen, strict=True)]
            labels = ",".join(pairs)
            if each.kind == "histogram":
                for bound in ("1", "+Inf"):
                    lines.append(f'{each.name}_bucket{{{labels},le="{bound}"}} {number}')
                lines += [f"{each.name}_{part}{{{labels}}} {number}" for part in ("sum", "count")]
            else:
                lines.append(f"{each.name}{{{labels}}} {number}")
    return "\n".join(lines) + "\n"


def list_alerts() -> list[tuple[str, str]]:
    """Return name and expression of every alert."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [(rule["alert"], rule["expr"]) for group in groups for rule in group["rules"]]


class _Series(http.server.BaseHTTPRequestHandler):
    """Shows the series, whose counters grow with every look."""

    definitions: list[MetricDefinition]
    num_looks = 0

    def do_GET(self) -> None:
        type(self).num_looks += 1
        self.send_response(200)
        self.send_header("content-type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(show(self.definitions, 10 * self.num_looks).encode())

    def log_message(self, *_: Any) -> None:
        pass


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    program = shutil.which("prometheus")
    if program is None:
        sys.exit("prometheus is not on the path: apt-get install prometheus")
    _Series.definitions = list_metrics()
    series = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Series)
    threading.Thread(target=series.serve_forever, daemon=True).start()
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "rule_files": [str(ALERTS)],
            "scrape_configs": [
                {
                    "job_name": "rapid",
                    "static_configs": [{"targets": [f"127.0.0.1:{series.server_port}"]}],
                }
            ],
        }
        path = Path(folder) / "prometheus.yml"
        path.write_text(yaml.safe_dump(settings))
        process = subprocess.Popen(
            [
                program,
                f"--config.file={path}",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=error",
            ]
        )
        try:
            failed = _ask_all(f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
            process.wait()
    print(*failed, sep="\n", end="\n" * bool(failed))
    sys.exit(bool(failed))


def _ask_all(url: str) -> list[str]:
    """Return a sentence for each query that was not answered as it should be."""
    with httpx.Client(base_url=url, trust_env=False) as client:
        _wait(client)
        failed: list[str] = []
        queries = [(f"dashboard: {query}", query) for query in list_queries()]
        for name, query in [*queries, *list_alerts()]:
            # An alert's comparison leaves nothing while all is well: its left side is asked.
            told = client.get("/api/v1/query", params={"query": _without_comparison(query)}).json()
            if told["status"] != "success":
                failed.append(f"{name}: {told['error']}")
            elif not told["data"]["result"]:
                failed.append(f"{name}: found nothing")
        loaded = client.get("/api/v1/rules").json()["data"]["groups"]
        rules = {rule["name"] for group in loaded for rule in group["rules"]}
        failed += [f"{name}: is not loaded" for name, _ in list_alerts() if name not in rules]
        print(f"{len(queries)} queries of the dashboard, {len(rules)} alerts: {len(failed)} failed")
        return failed


def _without_comparison(query: str) -> str:
    head, comparison, bound = query.rpartition(" > ")
    if comparison and bound.strip().replace(".", "").isdigit():
        return head
    return query.partition(" < ")[0] if " < " in query else query


def _wait(client: httpx.Client) -> None:
    """Wait until Prometheus has scraped the series often enough for a rate."""
    began = time.monotonic()
    while time.monotonic() - began < _PATIENCE_S:
        try:
            asked = {"query": "count_over_time(ray_rapid_ready[5m])"}
            found = client.get("/api/v1/query", params=asked).json()["data"]["result"]
            if found and int(found[0]["value"][1]) >= 3:
                return
        except (httpx.HTTPError, json.JSONDecodeError, KeyError):
            pass
        time.sleep(0.2)
    sys.exit(f"Prometheus has scraped nothing within {_PATIENCE_S:g} s")


if __name__ == "__main__":
    main()
