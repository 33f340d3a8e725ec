"""Time to the first text of questions about your own document, as `make run-text` answers them.

    python benchmarks/own_text.py [--dtype bfloat16]

needs `rapid models get smollm2-135m all-minilm-l6-v2`. The models, retrieval and settings are those
of `cluster/configs/own-text.yaml`, in this process, without Ray. The document is version 2 of the
GPL, about 4,000 tokens. The first question on it is *cold*: the target reads all of it, and
retrieval embeds it. After that every question is asked in one mode alone, because what one mode has
read another finds in the cache. Modes take turns in several rounds.

The seconds until the first text are given twice: as a clock saw them, which depends on what else
the machine does, and as the seconds of CPU of this process.
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

import yaml
from reporting import ROOT, keep, settings, shown, spread, table

from evaluation.loaders.real_text import load
from evaluation.tasks import Source
from rapid.config import EngineConfig, SpeculationConfig
from rapid.messages import Document
from rapid.pair import Pair, open_pair
from retrieval import RetrievalConfig

DOCUMENT = "general-public-license"
MODES = ("plain", "lossless", "auto")
MAX_TOKENS = 24
PARTS = ("retrieval", "target_prefill", "drafter_prefill")


def opened(dtype: str) -> Pair:
    """Open the target of `own-text.yaml`, which drafts for itself."""
    config = ROOT / "cluster/configs/own-text.yaml"
    args = yaml.safe_load(config.read_text())["applications"][0]["args"]
    return open_pair(
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
    return items[0].document, [item.messages[-1].content for item in items]


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def ask(pair: Pair, document: Document, question: str, mode: Any) -> dict[str, Any]:
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


def rows(answers: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    """Return one row for each kind of question, cold ones apart."""
    found = []
    for name in ("cold", *MODES):
        those = [each for each in answers if each["name"] == name]
        columns = ("first_s", "first_cpu_s", "whole_s")
        seconds = [shown(spread([each[key] for each in those])) for key in columns]
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
    options = parser.parse_args()
    document, questions = asked()
    answers = []
    with opened(options.dtype) as pair:
        for number, question in enumerate(questions):
            mode = "auto" if number == 0 else MODES[number % len(MODES)]
            answers.append(ask(pair, document, question, mode))
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
    title = f"A question about one's own text, SmolLM2-135M in {options.dtype}"
    keep(name, title, text, {"settings": settings(options), "answers": answers})


if __name__ == "__main__":
    main()
