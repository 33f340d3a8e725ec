"""Open-loop serving load: time to first token, time per token and goodput, by mode and rate.

    python -m benchmarks.serving.load [--url http://127.0.0.1:8000] [--rates 1 2 4] [--repeats 2]

Requests arrive as a Poisson process, independently of earlier requests, so that a server that falls
behind shows it. Modes take turns on the same arrivals, questions and documents. Each run's
documents are new to the server (they begin with a line of their own), and several questions share
one. Without `--url` the embedded application of `serve_config.yaml` is started and ended. With
`--url`, `--document FILE` and `--question TEXT ...` give text that the server's models can read.

Terms are those of vLLM's `bench serve`: `ttft` is the time until the first text, `tpot` the rest of
the answer by its further tokens, `itl` the time between two chunks (a chunk brings a round's
tokens), `e2el` the whole; `goodput` is the requests per second that met every bound of `--ttft-ms`
and `--tpot-ms`. The benchmark has its own client because it needs documents that are new with every
run, and modes that take turns; guidellm (0.8.1) makes its prompts from a data set and a tokenizer
and brings a torch of its own.

It takes about 9 minutes with the defaults, with `--quick` two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.reporting import keep, settings, table
from benchmarks.serving.embedded_application import embedded_application
from rapid.embedded.generator import generate_document

MODES = ("plain", "auto", "lossless", "fused")
MAX_TOKENS = 64
PERCENTILES = (50, 90, 99)


@dataclass
class Answered:
    """One request as a client saw it; times are in seconds."""

    ttft: float = 0.0
    e2el: float = 0.0
    itl: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""

    @property
    def tpot(self) -> float:
        return (self.e2el - self.ttft) / (self.tokens - 1) if self.tokens > 1 else 0.0


@dataclass(frozen=True)
class Asked:
    """One request: its time, its document and its question."""

    at: float
    document: str
    question: str


def arrivals(
    rate: float, count: int, sources: Sequence[tuple[str, Sequence[str]]], seed: int
) -> list[Asked]:
    """Return Poisson arrivals; each is about one of the documents, all about equally often."""
    rng = random.Random(seed)
    at, asked = 0.0, []
    for index in range(count):
        at += rng.expovariate(rate)
        document, questions = sources[index % len(sources)]
        asked.append(Asked(at, document, rng.choice(questions)))
    return asked


def generated(count: int, num_tokens: int) -> list[tuple[str, list[str]]]:
    """Return documents for the embedded models, with questions that need more than a name."""
    sources = []
    for seed in range(count):
        document = generate_document(f"load {seed}", num_tokens)
        long = [each.question for each in document.questions if each.kind != "fact"]
        sources.append((document.text, long or [each.question for each in document.questions]))
    return sources


async def ask(client: httpx.AsyncClient, model: str, mode: str, run: str, asked: Asked) -> Answered:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": asked.question}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
        "rapid": {
            "mode": mode,
            "documents": [{"name": "document", "text": f"{run}\n\n{asked.document}"}],
        },
    }
    told, began = Answered(), time.perf_counter()
    last = began
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                await reply.aread()
                told.error = f"{reply.status_code}: {reply.text[:200]}"
                return told
            async for line in reply.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                now, chunk = time.perf_counter(), json.loads(line[6:])
                if "error" in chunk:
                    told.error = str(chunk["error"])
                    return told
                if any(choice["delta"].get("content") for choice in chunk["choices"]):
                    if told.ttft:
                        told.itl.append(now - last)
                    else:
                        told.ttft = now - began
                    last = now
                if usage := chunk.get("usage"):
                    told.tokens = usage["completion_tokens"]
                    told.prompt_tokens = usage["prompt_tokens"]
                    told.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    except httpx.HTTPError as error:
        told.error = repr(error)
    told.e2el = last - began
    return told


async def run_load(url: str, model: str, mode: str, run: str, plan: Sequence[Asked]) -> Any:
    """Send every request at its time; return the answers, and seconds until the last has ended."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        began = time.perf_counter()

        async def later(asked: Asked) -> Answered:
            await asyncio.sleep(asked.at - (time.perf_counter() - began))
            return await ask(client, model, mode, run, asked)

        answers = await asyncio.gather(*map(later, plan))
        return answers, time.perf_counter() - began


def summary(
    answers: Sequence[Answered], seconds: float, ttft_ms: float, tpot_ms: float
) -> dict[str, Any]:
    """Summarise all runs of a mode at a rate; `seconds` is the sum of theirs."""
    done = [each for each in answers if not each.error]
    good = [e for e in done if 1e3 * e.ttft <= ttft_ms and 1e3 * e.tpot <= tpot_ms]
    found: dict[str, Any] = {
        "requests": len(answers),
        "failed": [each.error for each in answers if each.error],
        "requests_per_s": round(len(done) / seconds, 3),
        "goodput_per_s": round(len(good) / seconds, 3),
        "good_share": round(len(good) / len(answers), 3),
        "tokens_per_s": round(sum(each.tokens for each in done) / seconds, 2),
        "mean_tokens": round(sum(each.tokens for each in done) / max(len(done), 1), 1),
        "cached_share": round(
            sum(e.cached_tokens for e in done) / max(sum(e.prompt_tokens for e in done), 1), 3
        ),
    }
    values = {
        "ttft_ms": [each.ttft for each in done],
        "tpot_ms": [each.tpot for each in done if each.tokens > 1],
        "itl_ms": [gap for each in done for gap in each.itl],
        "e2el_ms": [each.e2el for each in done],
    }
    for name, seen in values.items():
        found[name] = {
            f"p{p}": round(1e3 * float(np.percentile(seen, p)), 1) for p in PERCENTILES if seen
        }
    return found


def measure(url: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    model = httpx.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"]
    if options.document:
        sources = [(options.document.read_text(), options.question)]
    else:
        sources = generated(options.documents, options.tokens)
    for mode in options.modes:  # a first request triggers lazy loading
        warm = arrivals(4.0, 3, sources, seed=0)
        asyncio.run(run_load(url, model, mode, f"Before {mode}.", warm))
    answers: dict[tuple[float, str], list[Answered]] = {}
    seconds: dict[tuple[float, str], float] = {}
    for repeat in range(options.repeats):
        for rate in options.rates:
            plan = arrivals(rate, options.requests, sources, seed=repeat + 1)
            first = repeat % len(options.modes)
            for mode in (*options.modes[first:], *options.modes[:first]):
                run = f"Copy {repeat + 1} at {rate:g} for {mode}."
                told, took = asyncio.run(run_load(url, model, mode, run, plan))
                answers.setdefault((rate, mode), []).extend(told)
                seconds[rate, mode] = seconds.get((rate, mode), 0.0) + took
                print(f"{run} {took:.1f} s", file=sys.stderr)
    return [
        {"rate": rate, "mode": mode}
        | summary(answers[rate, mode], seconds[rate, mode], options.ttft_ms, options.tpot_ms)
        for rate in options.rates
        for mode in options.modes
    ]


def told(cases: Sequence[dict[str, Any]], modes: Sequence[str]) -> str:
    """Return the tables, with modes as columns."""
    rows = []
    by = {(case["rate"], case["mode"]): case for case in cases}
    for rate in sorted({case["rate"] for case in cases}):

        def row(name: str, of: Any, rate: float = rate) -> list[str]:
            return [f"{rate:g}", name, *(of(by[rate, mode]) for mode in modes)]

        for name in ("ttft_ms", "tpot_ms", "itl_ms"):

            def percentiles(case: dict[str, Any], name: str = name) -> str:
                return " / ".join(f"{value:.0f}" for value in case[name].values())

            rows.append(row(name.replace("_", ", "), percentiles))
        rows.append(row("tokens/s", lambda case: f"{case['tokens_per_s']:.1f}"))
        rows.append(row("prompt cached", lambda case: f"{case['cached_share']:.0%}"))
        rows.append(row("failed", lambda case: str(len(case["failed"]))))
        rows.append(
            row(
                "goodput/s (share)",
                lambda case: f"{case['goodput_per_s']:.2f} ({case['good_share']:.0%})",
            )
        )
    return table(["requests/s", "p50 / p90 / p99", *modes], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--url", help="of a running server; none starts the embedded application")
    parser.add_argument("--document", type=Path, help="what is asked about, instead of our own")
    parser.add_argument("--question", nargs="+", help="asked about --document")
    parser.add_argument("--documents", type=int, default=6, help="of our own, in a run")
    parser.add_argument("--tokens", type=int, default=1000, help="of each")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 2.0, 4.0])
    parser.add_argument("--requests", type=int, default=30, help="in a run")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--ttft-ms", type=float, default=1000.0)
    parser.add_argument("--tpot-ms", type=float, default=50.0)
    parser.add_argument("--quick", action="store_true", help="one rate, 12 requests, once")
    options = parser.parse_args()
    if bool(options.document) != bool(options.question):
        parser.error("--document and --question go together")
    if options.quick:
        options.rates, options.requests, options.repeats = [1.0], 12, 1
    if options.url:
        cases = measure(options.url.rstrip("/"), options)
    else:
        with embedded_application() as application:
            cases = measure(application.url, options)
    text = told(cases, options.modes) + (
        f"\nBounds of goodput: first token within {options.ttft_ms:g} ms, then at most "
        f"{options.tpot_ms:g} ms a token. {options.repeats * options.requests} requests a cell.\n"
    )
    name = None if options.quick else "load"
    keep(name, "Open-loop load", text, {"settings": settings(options), "cases": cases})


if __name__ == "__main__":
    main()
