"""Fairness between tenants: shares of work among equals and by weight, and times of waiting.

    python -m benchmarks.serving.fairness [--seconds 60] [--repeats 2]

The embedded application serves four tenants, each with a key of its own. **Shares**: every tenant
asks with eight streams without pause, about documents that are new; their seconds of target and
drafter are those of the ledger (``GET /v1/usage``). Jain's index of n shares x is
``sum(x)^2 / (n * sum(x^2))`` (Jain, Chiu and Hawe, 1984), 1 for equals. **Weights**: the same with
weights. **Waiting**: three tenants ask now and then, together a quarter of what two cores can
answer, alone, and beside one with sixteen streams. Pools do not grow meanwhile.

It takes about twelve minutes with the defaults, with `--quick` two.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np

from benchmarks.reporting import keep, settings, shown, spread, table
from benchmarks.serving.embedded_application import embedded_application
from benchmarks.serving.load import Answered, Asked, arrivals, ask, generated
from library.accounts.callers import hash_key

TENANTS = ("a", "b", "c", "d")
WEIGHTS = {"equal": (1, 1, 1, 1), "weighted": (1, 1, 2, 4)}
LIGHT_RATE = 1 / 8  # questions a second of a tenant that is below its share
SETTLE_S = 3.0  # until the last answers are in the ledger


def client_of(url: str, tenant: str) -> httpx.AsyncClient:
    headers, limits = {"authorization": f"Bearer sk-{tenant}"}, httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=600, limits=limits)


async def ask_on(
    url: str, model: str, tenant: str, num_streams: int, run: str, sources: Any
) -> None:
    """Ask with so many streams without pause, each time about a new document; for ever."""
    async with client_of(url, tenant) as client:

        async def stream(number: int) -> None:
            document, questions = sources[number % len(sources)]
            for count in itertools.count():
                asked = Asked(0.0, document, questions[count % len(questions)])
                told = await ask(client, model, "auto", f"{run} {number}-{count}.", asked)
                await asyncio.sleep(1.0 if told.error else 0.0)

        await asyncio.gather(*map(stream, range(num_streams)))


def seconds_of(url: str) -> dict[str, float]:
    """Return the seconds of target and drafter by tenant, as the ledger has them."""
    headers = {"authorization": f"Bearer sk-{TENANTS[0]}"}
    query = f"{url}/v1/usage?tenant=*&group_by=tenant"
    rows = httpx.get(query, headers=headers, timeout=30).raise_for_status().json()["data"]
    return {each["tenant"]: each["target_s"] + each["drafter_s"] for each in rows}


async def measure_shares(
    url: str, model: str, run: str, seconds: float, sources: Any
) -> list[float]:
    """Return the seconds of engines of each tenant while all ask without pause."""
    crowd = [
        asyncio.create_task(ask_on(url, model, each, 8, f"{run} {each}", sources))
        for each in TENANTS
    ]
    await asyncio.sleep(seconds / 4)
    found = []
    for wait_s in (0.0, seconds):
        await asyncio.sleep(wait_s + SETTLE_S)
        found.append(await asyncio.to_thread(seconds_of, url))
    for task in crowd:
        task.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)
    return [found[1].get(each, 0.0) - found[0].get(each, 0.0) for each in TENANTS]


async def measure_waiting(
    url: str, model: str, run: str, seconds: float, sources: Any, heavy: int, seed: int
) -> list[Answered]:
    """Return the answers to three tenants that ask every 8 s on average."""
    flood = asyncio.create_task(ask_on(url, model, TENANTS[0], heavy, f"{run} heavy", sources))
    await asyncio.sleep(min(5.0, seconds / 4))
    began = time.perf_counter()

    async def later(client: httpx.AsyncClient, asked: Asked, name: str) -> Answered:
        await asyncio.sleep(max(0.0, asked.at - (time.perf_counter() - began)))
        return await ask(client, model, "auto", f"{run} {name}", asked)

    async def light(tenant: str, seed: int) -> list[Answered]:
        plan = arrivals(LIGHT_RATE, max(1, int(LIGHT_RATE * seconds)), sources, seed)
        async with client_of(url, tenant) as client:
            return await asyncio.gather(
                *(later(client, each, f"{tenant} {place}.") for place, each in enumerate(plan))
            )

    parts = await asyncio.gather(*(light(each, seed + i) for i, each in enumerate(TENANTS[1:])))
    flood.cancel()
    await asyncio.gather(flood, return_exceptions=True)
    return [each for part in parts for each in part]


def jain(shares: Sequence[float]) -> float:
    return sum(shares) ** 2 / (len(shares) * sum(each**2 for each in shares))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    sources, found = generated(8, 1000), dict[str, Any]()
    keys = [
        {"tenant": each, "sha256": hash_key(f"sk-{each}"), "operator": True} for each in TENANTS
    ]
    for name, weights in WEIGHTS.items():
        api = {"keys": keys, "tenant_weights": dict(zip(TENANTS, weights, strict=True))}
        with embedded_application(api, pools_grow=False) as application:
            url, model = application.url, "rapid-embedded"
            asyncio.run(measure_waiting(url, model, "Before.", 10.0, sources, 0, 0))
            parts = []
            for repeat in range(options.repeats):
                run = f"Copy {repeat} {name}."
                shares = asyncio.run(measure_shares(url, model, run, options.seconds, sources))
                parts.append([s / w for s, w in zip(shares, weights, strict=True)])
            found[name] = {
                "seconds_by_weight": parts,
                "jain": spread([jain(each) for each in parts]),
                "farthest": spread([max(abs(s * len(p) / sum(p) - 1) for s in p) for p in parts]),
            }
            for heavy in (0, 16) if name == "equal" else ():
                told = [
                    asyncio.run(
                        measure_waiting(
                            url, model, f"Wait {r} {heavy}.", options.seconds, sources, heavy, 9 * r
                        )
                    )
                    for r in range(options.repeats)
                ]
                found[f"beside {heavy} streams"] = {
                    "p95_s": spread(
                        [
                            float(np.percentile([e.ttft for e in run if not e.error], 95))
                            for run in told
                        ]
                    ),
                    "answered": sum(not each.error for run in told for each in run),
                    "refused": [each.error for run in told for each in run if each.error],
                }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="ten seconds, once; keeps nothing")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.repeats = 10.0, 1
    found = measure(options)
    rows = [
        [name, shown(found[name]["jain"], 3), f"{shown(found[name]['farthest'])}"]
        for name in WEIGHTS
    ]
    waits = [
        [name, shown(each["p95_s"]), each["answered"], len(each["refused"])]
        for name, each in found.items()
        if name not in WEIGHTS
    ]
    text = table(["four tenants", "Jain's index by weight", "farthest from its share"], rows)
    text += "\n" + table(["three light tenants", "first text p95, s", "answered", "refused"], waits)
    name = None if options.quick else "fairness"
    keep(name, "Fairness", text, {"settings": settings(options), "found": found})


if __name__ == "__main__":
    main()
