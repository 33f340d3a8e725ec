"""Time to the first text of questions about your own document, by SmolLM2-135M.

    python -m benchmarks.serving.own_text [--dtype bfloat16]
    python -m benchmarks.serving.own_text --url http://127.0.0.1:8000

needs `rapid models get smollm2-135m all-minilm-l6-v2`. The models, retrieval and settings are those
of `cluster/configs/own-text.yaml`, in this process, without Ray; or, with `--url`, those of a
server that runs with it and has not read the document yet. The document is version 2 of the GPL,
about 4,000 tokens. The first question on it is *cold*: the target reads all
of it, and retrieval embeds it. After that every question is asked in one mode alone, because what
one mode has read another finds in the cache. Modes take turns in several rounds.

The seconds until the first text are given twice: as a clock saw them, which depends on what else
the machine does, and as the seconds of CPU of this process (not of a server).
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import httpx
import yaml

import rapid
from benchmarks.reporting import ROOT, keep, settings, shown, spread, table
from evaluation.loaders.real_text import load
from evaluation.tasks import Source
from rapid.chat_messages import Document
from rapid.config import EngineConfig, SpeculationConfig
from retrieval import RetrievalConfig

DOCUMENT = "general-public-license"
MODES = ("plain", "lossless", "auto")
MAX_TOKENS = 24
PARTS = ("retrieval", "target_prefill", "drafter_prefill")


def open_pair(dtype: str) -> rapid.Pair:
    """Open the target of `own-text.yaml`, which drafts for itself."""
    config = ROOT / "cluster/configs/own-text.yaml"
    args = yaml.safe_load(config.read_text())["applications"][0]["args"]
    return rapid.open(
        EngineConfig(**args["target"]["engine"] | {"dtype": dtype}),
        retrieval=RetrievalConfig(**args["retriever"]["retrieval"]),
        speculation=SpeculationConfig(**args["speculation"]),
    )


def asked() -> tuple[Document, list[str]]:
    """Return the document and the questions about it."""
    items = [
        item
        for split in ("dev", "test")
        for item in load(Source(loader="real_text", split=split), None)
        if item.document is not None and item.id.startswith(DOCUMENT)
    ]
    assert items[0].document is not None
    return items[0].document, [item.messages[-1].text for item in items]


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def ask(pair: rapid.Pair, document: Document, question: str, mode: Any) -> dict[str, Any]:
    """Return the seconds until the first text and until the last, and milliseconds by part."""
    began, used = time.perf_counter(), cpu_s()
    stream = pair.stream(
        question, documents=[document], mode=mode, max_tokens=MAX_TOKENS, temperature=0.0
    )
    next(stream)
    first_s, first_cpu_s = time.perf_counter() - began, cpu_s() - used
    for _ in stream:
        pass
    assert stream.answer is not None
    receipt = stream.answer.receipt
    return {
        "asked": mode,
        "mode": receipt.mode,
        "first_s": first_s,
        "first_cpu_s": first_cpu_s,
        "whole_s": time.perf_counter() - began,
        "ms": {part: round(receipt.timings_ms.get(part, 0.0)) for part in PARTS},
        "prompt_tokens": receipt.prompt_tokens,
        "cached_tokens": receipt.cached_tokens,
    }


def ask_server(
    client: httpx.Client, document: Document, question: str, mode: Any
) -> dict[str, Any]:
    """Return the same of a server, whose CPU is not seen from here."""
    rapid = {"mode": mode, "documents": [{"name": document.name, "text": document.text}]}
    body = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "rapid": rapid,
    }
    began, first_s = time.perf_counter(), None
    receipt: dict[str, Any] = {}
    usage: dict[str, Any] = {}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.is_error:
            raise SystemExit(f"the server: {response.read().decode()}")
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise SystemExit(f"the server: {event['error']['message']}")
            if any(choice["delta"].get("content") for choice in event["choices"]):
                first_s = first_s or time.perf_counter() - began
            receipt, usage = event.get("rapid") or receipt, event.get("usage") or usage
    return {
        "asked": mode,
        "mode": receipt["mode"],
        "first_s": first_s,
        "whole_s": time.perf_counter() - began,
        "ms": {part: round(receipt["timings_ms"].get(part, 0.0)) for part in PARTS},
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
    }


def asking(options: argparse.Namespace) -> tuple[AbstractContextManager[Any], Callable[..., Any]]:
    """Return the pair in this process or the client of a server, and how to ask it."""
    if options.url is None:
        return open_pair(options.dtype), ask
    client = httpx.Client(base_url=options.url, timeout=600, trust_env=False)
    return client, ask_server


def rows(answers: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    """Return one row for each kind of question, cold ones apart."""
    found = []
    for name in ("cold", *MODES):
        those = [each for each in answers if each["name"] == name]
        columns = ("first_s", "first_cpu_s", "whole_s")
        seconds = [
            shown(spread([each[key] for each in those])) if key in those[0] else ""
            for key in columns
        ]
        parts = " / ".join(
            f"{spread([each['ms'][part] for each in those])['median']:.0f}" for part in PARTS
        )
        found.append((name, len(those), *seconds, parts))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--url", help="of a server; otherwise the models run in this process")
    options = parser.parse_args()
    document, questions = asked()
    answers = []
    opening, ask_one = asking(options)
    with opening as answering:
        for number, question in enumerate(questions):
            mode = "auto" if number == 0 else MODES[number % len(MODES)]
            answers.append(ask_one(answering, document, question, mode))
            answers[-1]["name"] = mode if number else "cold"
    columns = (
        "question",
        "questions",
        "first text, s",
        "s of CPU",
        f"all {MAX_TOKENS} tokens, s",
        "ms of retrieval / target's / drafter's reading",
    )
    text = table(columns, rows(answers))
    name = "own_text" if options.dtype == "float32" else f"own_text-{options.dtype}"
    where = "" if options.url is None else ", over HTTP"
    title = f"A question about one's own text, SmolLM2-135M in {options.dtype}{where}"
    report = {"settings": settings(options), "answers": answers}
    keep(f"{name}-served" if options.url else name, title, text, report)


if __name__ == "__main__":
    main()
