"""Our rounds against those of the reference RAPID code, with equal weights, prompts and rule.

    python -m benchmarks.decoding.reference --checkout DIR [--environment DIR]
        [--repeats 7] [--quick]

DIR is a checkout of John-AI-Lab/RAPID. It runs unedited, in a process and an environment of its own
(`reference_side.py`). The environment is made in `--environment` the first time, with the versions
that the reference was written for. None of its code is in this repository.

The embedded models answer a question on 3,000 tokens, and their drafter reads what surrounds the
evidence. A model of random weights drafts for itself, as the paper's models do, on the last part of
its prompt. At 16K its keys and values weigh as much as its weights, as those of an 8B model do at
128K. Our side uses the rule `paper` (distill on the whole vocabulary, blocks that end at an
unlikely token, a bonus token) and the same draft length, so that the rounds are of one kind.

The two sides take turns within a repetition, and ratios are of neighbours. Both have one thread:
with two, other load makes the reference's threads wait for each other (4 tokens a second instead of
240). Their random draws differ, so the numbers of drafted and accepted tokens are reported. Reading
the prompts is not timed. The goal is that our round takes at most half the reference's time.

It takes about 10 minutes on two cores, and more for the environment the first time, with `--quick`
one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rapid
from benchmarks.decoding.embedded_prompts import prompts
from benchmarks.engine.random_checkpoint import save_random_llama
from benchmarks.reporting import keep, ratios, shown, spread, table
from rapid.config import EngineConfig, SamplingConfig, SpeculationConfig
from rapid.embedded import DRAFTER, TARGET
from rapid.engines.engine import Engine
from rapid.engines.forward.weights.loading import LoadedModel, load_model
from rapid.engines.local_ports import EngineDrafter, EngineVerifier
from rapid.messages import LeaseRequest, Terms, as_prompt
from rapid.speculation.loop import speculate
from rapid.speculation.statistics import RoundStatistics

PINNED = ("torch==2.13.0", "transformers==4.45.2", "accelerate==0.34.2", "numpy<2")
MAX_DRAFT, ETA = 10, 10.0

Case = dict[str, Any]
Side = Callable[[Case], dict[str, float]]


def environment(folder: Path) -> Path:
    """Return the interpreter of the reference's environment, making the environment if needed."""
    python = folder / "bin/python"
    if not (folder / ".complete").exists():
        print(f"installing {', '.join(PINNED)} into {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PINNED], check=True)
        (folder / ".complete").touch()
    return python


@contextmanager
def reference(python: Path, checkout: Path, threads: int) -> Iterator[Side]:
    """Run the reference's side in its own process."""
    script = Path(__file__).with_name("reference_side.py")
    process = subprocess.Popen(
        [str(python), str(script), str(checkout.resolve()), str(threads)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin
    assert process.stdout
    commands, answers = process.stdin, process.stdout

    def run(case: Case) -> dict[str, float]:
        commands.write(json.dumps(case) + "\n")
        commands.flush()
        answer = answers.readline()
        if not answer:
            raise SystemExit("the reference's process ended: see what it printed above")
        times: dict[str, float] = json.loads(answer)
        return times

    try:
        yield run
    finally:
        commands.close()
        process.wait(60)


class Ours:
    """Our side, in this process, with engines that are kept and new leases for each run."""

    def __init__(self, case: Case, loaded: dict[str, LoadedModel]) -> None:
        self._engines = [
            _engine(loaded[case[model]], len(case[prompt]) + case["max_tokens"])
            for model, prompt in (("target", "prompt"), ("drafter", "short"))
        ]

    def run(self, case: Case) -> dict[str, float]:
        return asyncio.run(self._run(case))

    async def _run(self, case: Case) -> dict[str, float]:
        sampling = SamplingConfig(seed=case["seed"])
        rule = SpeculationConfig(rule="paper", eta=ETA, max_draft=MAX_DRAFT)
        prompts = (case["prompt"], case["short"])
        for engine, prompt in zip(self._engines, prompts, strict=True):
            ids = as_prompt(prompt)
            await engine.open(
                LeaseRequest("one", Terms("one", sampling, rule, case["max_tokens"]), ids)
            )
            await engine.prefill("one")
        statistics = RoundStatistics()
        target, drafter = self._engines
        port = EngineDrafter(drafter, "one") if case["speculative"] else None
        began, began_cpu = time.perf_counter(), time.process_time()
        async for verdict in speculate(
            port,
            EngineVerifier(target, "one"),
            max_tokens=case["max_tokens"],
            max_draft=case["max_draft"],
        ):
            statistics.observe(verdict)
        decode_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
        for engine in self._engines:
            engine.release("one")
        return {
            "decode_s": decode_s,
            "cpu_s": cpu_s,
            "tokens": len(statistics.token_ids),
            "rounds": statistics.rounds,
            "drafted": statistics.drafted,
            "accepted": statistics.accepted,
            "draft_s": statistics.draft_ms / 1e3,
            "verify_s": statistics.verify_ms / 1e3,
        }

    def close(self) -> None:
        for engine in self._engines:
            engine.close()


def products_ms(loaded: LoadedModel, num_rows: int) -> float:
    """Time only a forward's products of rows and weights, each projection at its best."""
    with torch.inference_mode():
        layers = [one for one in loaded.model.modules() if isinstance(one, torch.nn.Linear)]
        inputs = {one.in_features: torch.randn(num_rows, one.in_features) for one in layers}
        times = []
        for _ in range(10):
            began = time.perf_counter()
            for one in layers:
                one(inputs[one.in_features])
            times.append(1e3 * (time.perf_counter() - began))
    return min(times)


def _engine(loaded: LoadedModel, num_tokens: int) -> Engine:
    config = EngineConfig(
        model=loaded.config.model,
        max_context=num_tokens + MAX_DRAFT,
        kv_cache_tokens=2 * num_tokens,
        step_tokens=1024,
        threads=torch.get_num_threads(),
        draft_ahead=False,  # as in `rapid.generate`: two engines in one process share Python's lock
    )
    return Engine(loaded, config)


def measure(
    name: str, case: Case, theirs: Side, ours: Ours, loaded: dict[str, LoadedModel], repeats: int
) -> dict[str, Any]:
    """Measure one case on both sides, speculative and plain, in turn."""
    sides: dict[str, Side] = {"reference": theirs, "ours": ours.run}
    runs: dict[tuple[str, bool], list[dict[str, float]]] = {}
    for repeat in range(-1, repeats):  # the first repetition reads the prompts and does not count
        for speculative in (True, False):
            for side, run in sides.items():
                asked = case | {"seed": repeat + 1, "speculative": speculative}
                times = run(asked)
                if repeat >= 0:
                    runs.setdefault((side, speculative), []).append(times)
    found: dict[str, Any] = {"model": name, "context": len(case["prompt"]), "repeats": repeats}
    round_ms = {side: per(runs[side, True], "decode_s", "rounds", 1e3) for side in sides}
    cpu_ms = {side: per(runs[side, True], "cpu_s", "rounds", 1e3) for side in sides}
    for side in sides:
        found[side] = {
            "round_ms": spread(round_ms[side]),
            "round_cpu_ms": spread(cpu_ms[side]),
            "tokens_per_s": spread(per(runs[side, True], "tokens", "decode_s")),
            "plain_tokens_per_s": spread(per(runs[side, False], "tokens", "decode_s")),
            "drafted_per_round": spread(per(runs[side, True], "drafted", "rounds")),
            "accepted_of_drafted": spread(per(runs[side, True], "accepted", "drafted")),
        }
    for part in ("draft", "verify"):
        found["ours"][f"{part}_ms"] = spread(per(runs["ours", True], f"{part}_s", "rounds", 1e3))
    num_drafted = found["ours"]["drafted_per_round"]["median"]
    found["products_ms"] = round(
        num_drafted * products_ms(loaded[case["drafter"]], 1)
        + products_ms(loaded[case["target"]], round(num_drafted) + 1),
        1,
    )
    found["round_over_reference"] = ratios(round_ms["ours"], round_ms["reference"])
    found["round_cpu_over_reference"] = ratios(cpu_ms["ours"], cpu_ms["reference"])
    found["plain_over_reference"] = ratios(
        per(runs["ours", False], "tokens", "decode_s"),
        per(runs["reference", False], "tokens", "decode_s"),
    )
    return found


def per(runs: list[dict[str, float]], above: str, below: str, scale: float = 1.0) -> list[float]:
    return [scale * run[above] / run[below] for run in runs]


def told(cases: list[dict[str, Any]]) -> str:
    header = (
        "model", "context", "round, reference, ms", "round, ours, ms", "ours / reference",
        "in CPU time", "products alone, ms",
        "drafted a round", "accepted", "decode tokens/s", "plain tokens/s",
        "plain, ours / reference",
    )  # fmt: skip
    rows = []
    for case in cases:
        ours, theirs = case["ours"], case["reference"]

        def both(what: str, ours: Any = ours, theirs: Any = theirs) -> str:
            return f"{theirs[what]['median']:.3g} / {ours[what]['median']:.3g}"

        rows.append(
            (
                case["model"],
                case["context"],
                shown(theirs["round_ms"], 1),
                shown(ours["round_ms"], 1),
                shown(case["round_over_reference"]),
                shown(case["round_cpu_over_reference"]),
                case["products_ms"],
                both("drafted_per_round"),
                both("accepted_of_drafted"),
                both("tokens_per_s"),
                both("plain_tokens_per_s"),
                shown(case["plain_over_reference"]),
            )
        )
    note = (
        "Medians (least to most) over the repetitions; where a cell has two numbers the first is "
        "the reference's. Products: rows by weights of our drafted tokens and of the verification, "
        "measured by themselves.\n"
    )
    return f"{table(header, rows)}\n{note}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--checkout", type=Path, required=True, help="of John-AI-Lab/RAPID")
    parser.add_argument(
        "--environment", type=Path, default=Path.home() / ".cache/rapid-serve/reference"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--quick", action="store_true", help="short prompts, three repetitions")
    options = parser.parse_args()
    if not (options.checkout / "src/utils.py").exists():
        parser.error(f"{options.checkout} is no checkout of John-AI-Lab/RAPID: no src/utils.py")
    if options.quick:
        options.lengths, options.repeats = [1024], 3
    torch.set_num_threads(options.threads)
    python = environment(options.environment)
    rng = np.random.default_rng(0)
    with (
        tempfile.TemporaryDirectory(prefix="rapid-") as folder,
        reference(python, options.checkout, options.threads) as theirs,
    ):
        random = str(save_random_llama(Path(folder)))
        embedded = (str(TARGET), str(DRAFTER))
        asked = [("embedded", embedded, prompts("reference", 3000))]
        for length in options.lengths:
            prompt = rng.integers(10, 32_000, length).tolist()
            asked.append(("random", (random, random), (prompt, prompt[-min(length // 2, 1024) :])))
        loaded = {
            path: load_model(EngineConfig(model=path, device="cpu", threads=options.threads))
            for path in (*embedded, random)
        }
        found = []
        for name, (target, drafter), (prompt, short) in asked:
            case = {
                "target": target,
                "drafter": drafter,
                "prompt": prompt,
                "short": short,
                "eos_ids": sorted(loaded[target].eos_ids) or None,
                "max_draft": MAX_DRAFT,
                "eta": ETA,
                "max_tokens": options.max_tokens,
            }
            ours = Ours(case, loaded)
            try:
                found.append(measure(name, case, theirs, ours, loaded, options.repeats))
            finally:
                ours.close()
            print(told(found[-1:]), file=sys.stderr)
    report = {
        "reference": {
            "repository": "John-AI-Lab/RAPID",
            "commit": commit(options.checkout),
            "environment": PINNED,
        },
        "rapid": rapid.__name__,
        "torch": torch.__version__,
        "threads": options.threads,
        "dtype": "float32",
        "max_draft": MAX_DRAFT,
        "eta": ETA,
        "max_tokens": options.max_tokens,
        "cases": found,
    }
    title = "Rounds against the reference RAPID code"
    keep(None if options.quick else "reference", title, told(found), report)


def commit(checkout: Path) -> str:
    """Return the commit of the checkout; empty where it is an unpacked archive."""
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
