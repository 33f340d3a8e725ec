"""What a lost process of a model in two processes costs: seconds until leases end and nothing runs.

    python -m benchmarks.serving.lost_ranks [--repeats 3]     # three minutes

The application has the targets of `cluster/configs/two-processes.yaml`, two of them and no drafter,
on a private Ray on loopback. Each row kills or stops one process of a target, its second (a
follower) or its first (the engine's actor), while it is idle or in the middle of an answer.
Measured from the signal on, on the clock of this process:

    leases    until a lease on that engine has ended, as its holder hears it
    gone      until no process of that engine is left
    pause     the longest time without text in the answer, which continues on the other target
    back      until there are two targets again, with all their processes

The answer's text must be that of an undisturbed one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import psutil
import yaml

from benchmarks.reporting import ROOT, keep, settings, shown, spread, table
from deployments.cli.server_process import LOCAL_RAY
from rapid.config import SamplingConfig, SpeculationConfig
from rapid.embedded.generator import generate_document
from rapid.messages import LeaseRequest, as_prompt
from tests.ray_cluster import free_port, wait_until

APP = "rapid"
CONFIG = ROOT / "cluster/configs/two-processes.yaml"
FOLLOWER = "rapid.engines.parallel.follower"
PATIENCE_S = 180.0
SEEDS = 8  # of answers, of which the longest is asked for
LOSSES = {
    "follower killed": ("follower", signal.SIGKILL),
    "first killed": ("first", signal.SIGKILL),
    "follower stopped": ("follower", signal.SIGSTOP),
}
COLUMNS = {
    "leases": "leases end",
    "gone": "no process left",
    "pause": "longest pause",
    "back": "back",
}
NAMES = itertools.count()


class Target:
    """One target: its engine's actor and processes."""

    def __init__(self, engine: Any) -> None:
        import ray

        self.engine = engine
        first = psutil.Process(ray.get(engine.ping.remote(), timeout=PATIENCE_S))
        self.processes = {"first": first}
        for child in first.children():
            if FOLLOWER in child.cmdline():
                self.processes["follower"] = child

    @property
    def num_leases(self) -> int:
        import ray

        return int(ray.get(self.engine.status.remote()).leases_open)

    def lease(self) -> Any:
        """Open a lease, and return what is resolved when it ends."""
        import ray

        request = LeaseRequest(
            f"held-{next(NAMES)}", "local", as_prompt(range(30, 50)), 8, SamplingConfig(),
            SpeculationConfig(),
        )  # fmt: skip
        ray.get(self.engine.open.remote(request))
        return self.engine.wait_closed.remote(request.lease_id)

    @property
    def is_gone(self) -> bool:
        return not any(map(_is_alive, self.processes.values()))


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def targets() -> list[Target]:
    """Return the targets that live and have all their processes."""
    from deployments.pools.engine_actor import engines_of

    found = []
    for name, engine in engines_of(APP).items():
        if name.startswith(f"{APP}/Target"):
            with suppress(Exception):  # it is dying, or loading
                found.append(Target(engine))
    return [each for each in found if len(each.processes) == 2 and not each.is_gone]


class Asking:
    """An answer that is being streamed, in a thread."""

    def __init__(self, url: str, seed: int) -> None:
        self.text, self.heard, self.seed = "", [time.monotonic()], seed
        self._url = url
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        document = generate_document(11, 300)
        request = {
            "model": "rapid-embedded",
            "messages": [{"role": "user", "content": document.questions[0].question}],
            "temperature": 1.5,
            "seed": self.seed,
            "max_tokens": 400,
            "stream": True,
            "rapid": {"mode": "plain", "documents": [{"name": "a", "text": document.text}]},
        }
        url = f"{self._url}/v1/chat/completions"
        with httpx.stream("POST", url, json=request, timeout=PATIENCE_S) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    choices = json.loads(line.removeprefix("data: "))["choices"]
                    said = "".join(choice["delta"].get("content") or "" for choice in choices)
                    if said:
                        self.text += said
                        self.heard.append(time.monotonic())

    def wait_until_busy(self) -> None:
        wait_until(lambda: len(self.heard) > 1, PATIENCE_S, 0.001)

    def finished(self) -> str:
        self._thread.join()
        return self.text

    def pause_s(self, since: float) -> float:
        """Return the longest time without text that ended after `since`."""
        pairs = itertools.pairwise(self.heard)
        return max((after - before for before, after in pairs if after > since), default=0.0)


def lose(who: str, number: signal.Signals, asking: Asking | None) -> dict[str, float]:
    """Signal a process of a target; return what that cost."""
    import ray

    if asking is not None:
        asking.wait_until_busy()
    target = max(targets(), key=lambda each: each.num_leases)
    if asking is not None and not target.num_leases:
        raise SystemExit("the answer had ended before anything was broken")
    ending = target.lease()
    began = time.monotonic()
    target.processes[who].send_signal(number)
    ray.wait([ending], timeout=PATIENCE_S)
    measured = {"leases": time.monotonic() - began}
    wait_until(lambda: target.is_gone, PATIENCE_S, 0.002)
    measured["gone"] = time.monotonic() - began
    if asking is not None:
        asking.finished()
        measured["pause"] = asking.pause_s(began)
    wait_until(lambda: len(targets()) == 2, PATIENCE_S, 0.1)
    measured["back"] = time.monotonic() - began
    return measured


@contextmanager
def served() -> Iterator[str]:
    """Serve the application with two targets on a private Ray; its address."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name, value in LOCAL_RAY.items():
        os.environ.setdefault(name, value)
    import ray
    from ray import serve

    from deployments.app import build

    (shipped,) = yaml.safe_load(CONFIG.read_text())["applications"]
    settings = {name: shipped["args"][name] for name in ("target", "orchestrator", "api")}
    settings["target"]["pool"]["min_replicas"] = 2
    settings["drafter"] = "prompt_lookup"
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="rapid-", dir="/tmp") as folder:
        try:
            ray.init(
                num_cpus=4,
                include_dashboard=False,
                log_to_driver=False,
                _temp_dir=folder,
                _node_ip_address="127.0.0.1",
            )
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(build(settings), name=APP)
            wait_until(lambda: len(targets()) == 2, PATIENCE_S, 0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rows: list[list[object]] = []
    report: dict[str, Any] = {"settings": settings(options), "seconds": {}}
    with served() as url:
        tried = [Asking(url, seed) for seed in range(SEEDS)]
        longest = max(tried, key=lambda each: len(each.finished()))
        for (name, (who, number)), is_busy in itertools.product(LOSSES.items(), (False, True)):
            found = []
            for _ in range(options.repeats):
                asking = Asking(url, longest.seed) if is_busy else None
                found.append(lose(who, number, asking))
                if asking is not None and asking.text != longest.text:
                    raise SystemExit(f"{name}: another text")
            state = "answering" if is_busy else "idle"
            seen = {
                what: spread([each[what] for each in found]) for what in COLUMNS if what in found[0]
            }
            report["seconds"][f"{name}, {state}"] = seen
            rows.append([name, state, *(_cell(seen.get(each)) for each in COLUMNS)])
            print(*rows[-1], flush=True)
    header = ("lost", "while", *COLUMNS.values())
    text = f"Seconds, the median (least to most):\n\n{table(header, rows)}"
    keep("lost_ranks", "What a lost process of a target in two processes costs", text, report)


def _cell(seen: dict[str, Any] | None) -> str:
    return "" if seen is None else shown(seen)


if __name__ == "__main__":
    main()
