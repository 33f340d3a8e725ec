"""Decoding times of `auto` and `lossless` against `plain` in the served application.

    python -m benchmarks.serving.served_draft_length [--pairs 21] [--tokens 96]
        [--contexts 500 1500 4000]

The application of `serve_config.yaml`, with one replica per pool and engines without an end of
sequence, answers greedy requests to the orchestrator, one at a time. Every group runs one question
on one document in each way, in random order: `plain`, and each way that is compared with it. The
ratio is plain's decoding time per token over the other's; below 1 the other is slower. Decoding is
what comes after an answer's first text; requests include log probabilities, which show the tokens
of each text.

The ways are:

- `plain` again, which shows the spread of the measurement itself;
- `lossless` with the embedded drafter;
- `auto` where nothing is retrieved, which is plain decoding after a search;
- `auto` where something is retrieved, which is `fused`: it has to draft, and its answer differs;
- `auto` on a second application whose drafter is prompt lookup, which is `lossless` there.

The goal is a median of at least 0.97 wherever `auto` promises the target's own answer. All requests
share an orchestrator and so its `RoundCosts`. The first group of a document, which pays for the
controller's trials, is reported separately.

It takes about 5 minutes on two cores, with `--quick` one.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ray import serve

from benchmarks.reporting import interval, keep, table
from benchmarks.serving.rounds import embedded, local_serve
from deployments.app import compose
from deployments.config.serve_config import ServeConfig
from rapid.chat_messages import Document, Message
from rapid.config import EngineConfig
from rapid.embedded.generator import generate_document
from rapid.engines.engine import Engine
from rapid.engines.forward.weights.loading import load_model
from rapid.events import Finished, TextDelta
from rapid.messages import GenerateRequest, SpeculationRequest
from rapid.receipt import ChoiceStatistics, Receipt

WAYS: dict[str, dict[str, Any]] = {
    "plain": {"mode": "plain"},
    "plain, again": {"mode": "plain"},
    "lossless": {"mode": "lossless"},
    "auto, nothing found": {"mode": "auto", "query": "xylograph"},
    "auto, evidence": {"mode": "auto"},
    "auto, prompt lookup": {"mode": "auto"},
}
RESOLVED = {
    "plain": "plain",
    "plain, again": "plain",
    "lossless": "lossless",
    "auto, nothing found": "plain",
    "auto, evidence": "fused",
    "auto, prompt lookup": "lossless",
}


def load_endless(config: EngineConfig) -> Engine:
    """Load an engine whose answers have the requested length."""
    return Engine(replace(load_model(config, with_pools=True), eos_ids=frozenset()), config)


def application(config: ServeConfig, longest: int, drafter: str | None = None) -> ServeConfig:
    """Return `config` with room for answers on documents of so many tokens."""
    settings = config.model_dump(exclude_unset=True)
    settings["target"]["engine"]["max_context"] = longest
    settings["orchestrator"]["pool"]["max_replicas"] = 1
    if drafter:
        settings["drafter"] = drafter
        del settings["retriever"]
    return ServeConfig.model_validate(settings)


async def ask(
    orchestrator: Any,
    document: Document,
    question: str,
    num_tokens: int,
    *,
    mode: str,
    **fields: Any,
) -> tuple[float, Receipt]:
    """Return the seconds per token after the first text, and the receipt."""
    request = GenerateRequest(
        f"{time.time_ns()}",
        "local",
        (Message("user", question),),
        documents=(document,),
        temperature=0.0,
        max_tokens=num_tokens,
        num_logprobs=0,
        speculation=SpeculationRequest(mode=mode),
        **fields,
    )
    seen: list[tuple[float, int]] = []
    receipt = None
    async for event in orchestrator.remote(request):
        if isinstance(event, TextDelta):
            seen.append((time.perf_counter(), len(event.logprobs)))
        elif isinstance(event, Finished):
            receipt = event.receipt
    assert receipt is not None
    assert sum(tokens for _, tokens in seen) == num_tokens
    (began, _), *later = seen
    return (later[-1][0] - began) / sum(tokens for _, tokens in later), receipt


async def measure(
    app: str, ways: Sequence[str], context: int, options: Any
) -> list[dict[str, Any]]:
    """Measure interleaved groups on a document of this length; return one row per way."""
    handle = serve.get_deployment_handle("Orchestrator", app)
    orchestrator = handle.options(stream=True, method_name="generate", _by_reference=False)
    written = generate_document(f"served {context}", context)
    document = Document(written.name, written.text)
    rng = random.Random(context)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    counted: dict[str, list[ChoiceStatistics]] = {way: [] for way in ways}
    for group in range(options.pairs + 1):
        question = written.questions[group % len(written.questions)].question
        for way in rng.sample(ways, len(ways)):
            took, receipt = await ask(orchestrator, document, question, options.tokens, **WAYS[way])
            assert receipt.mode == RESOLVED[way], (way, receipt.reason)
            seconds[way].append(took)
            if group:
                counted[way].append(receipt.choices[0])
    rows = []
    for way in ways[1:]:
        first, *ratios = [
            plain / other for plain, other in zip(seconds["plain"], seconds[way], strict=True)
        ]
        low, high = interval(ratios)
        drafted = sum(choice.drafted_rounds for choice in counted[way])
        rows.append(
            {
                "way": way,
                "mode": RESOLVED[way],
                "context": context,
                "plain_ms_per_token": round(1e3 * statistics.median(seconds["plain"][1:]), 3),
                "first_pair": round(first, 3),
                "median": round(statistics.median(ratios), 3),
                "interval_95": [round(low, 3), round(high, 3)],
                "drafted_rounds": f"{drafted} of {sum(each.rounds for each in counted[way])}",
            }
        )
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    return rows


async def measure_all(app: str, ways: Sequence[str], options: Any) -> list[dict[str, Any]]:
    """Return the rows of all documents."""
    return [row for n in options.contexts for row in await measure(app, ways, n, options)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--contexts", type=int, nargs="+", default=[500, 1500, 4000])
    parser.add_argument("--quick", action="store_true", help="three groups on the first document")
    options = parser.parse_args()
    if options.quick:
        options.pairs, options.contexts = 3, options.contexts[:1]
    longest = max(options.contexts) + 400 + options.tokens
    *drafted, looked_up = WAYS
    applications = {"drafter": (None, drafted), "lookup": ("prompt_lookup", ["plain", looked_up])}
    rows: list[dict[str, Any]] = []
    with local_serve():
        for app, (drafter, ways) in applications.items():
            config = application(embedded(), longest, drafter)
            serve.run(compose(config, load_endless, load_endless), name=app, route_prefix="/")
            rows += asyncio.run(measure_all(app, ways, options))
            serve.delete(app)
    title = "Through Ray: plain's time per token by that of auto and lossless"
    text = table([key.replace("_", " ") for key in rows[0]], [list(row.values()) for row in rows])
    name = None if options.quick else "served_draft_length"
    keep(name, title, text, {"settings": vars(options), "cases": rows})


if __name__ == "__main__":
    main()
