"""The time that a tenant's limits add to a request, until its first text.

    python -m benchmarks.serving.quotas [--repeats 200]

Two tenants ask the embedded application the same short question, one of them with limits of
requests and tokens a minute that it never reaches. It takes a minute with the defaults.
"""

from __future__ import annotations

import argparse
import asyncio

import httpx

from benchmarks.reporting import interval, keep, settings, shown, spread, table
from benchmarks.serving.embedded_application import embedded_application
from benchmarks.serving.fairness import client_of
from benchmarks.serving.load import Asked, ask
from library.accounts.callers import hash_key

TENANTS = ("limited", "free")
LIMITS = {"requests_per_minute": 1_000_000, "tokens_per_minute": 1_000_000_000}
BEFORE = 10  # questions that are not counted


async def ask_in_turns(url: str, repeats: int) -> dict[str, list[float]]:
    """Return the milliseconds until the first text, by tenant."""
    found: dict[str, list[float]] = {tenant: [] for tenant in TENANTS}
    asked = Asked(0.0, "The gate of Oxeye is red.", "Which colour has the gate of Oxeye?")
    limited, free = (client_of(url, tenant) for tenant in TENANTS)
    async with limited, free:
        clients = dict(zip(TENANTS, (limited, free), strict=True))
        for repeat in range(BEFORE + repeats):
            for tenant in sorted(TENANTS, reverse=bool(repeat % 2)):
                told = await ask(clients[tenant], "rapid-embedded", "plain", "", asked)
                if told.error:
                    raise SystemExit(told.error)
                found[tenant].append(1e3 * told.ttft)
    return {tenant: each[BEFORE:] for tenant, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="twenty times; keeps nothing")
    options = parser.parse_args()
    if options.quick:
        options.repeats = 20
    keys = [
        {"tenant": each, "sha256": hash_key(f"sk-{each}"), "operator": True} for each in TENANTS
    ]
    with embedded_application({"keys": keys}, pools_grow=False) as application:
        given = {"authorization": "Bearer sk-limited"}
        limits = f"{application.url}/v1/admin/limits/limited"
        httpx.post(limits, json=LIMITS, headers=given).raise_for_status()
        found = asyncio.run(ask_in_turns(application.url, options.repeats))
    more = [a - b for a, b in zip(found["limited"], found["free"], strict=True)]
    rows = [[name, shown(spread(each, 1))] for name, each in (found | {"difference": more}).items()]
    low, high = interval(more)
    text = table(["tenant", "first text, ms"], rows)
    text += f"\nThe difference's median is within {low:.2f} and {high:.2f} ms (95 %).\n"
    name = None if options.quick else "quotas"
    keep(name, "Quotas", text, {"settings": settings(options), "found": found})


if __name__ == "__main__":
    main()
