"""The time that `rapid.explain` costs: the same questions, answered with and without it.

    python -m benchmarks.decoding.explained [--target MODEL --drafter MODEL] [--quick]

The embedded pair, or another, answers each question once in either way, in turn, and the texts must
be the same. A ratio is that of a repetition's answers: of the `whole` of their seconds, of those of
their `rounds`, of which reading is no part, and of the `processors`, which say most on a busy
machine. The goal is at most 1.03.

It takes about 8 minutes on two cores, with `--quick` half a minute.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import rapid
from benchmarks.reporting import keep, ratios, shown, spread, table
from rapid.embedded.generator import generate_document
from rapid.pair.pair import Pair

MODES = ("plain", "rag", "lossless", "fused")
NUM_TOKENS = 96
MEASURED = ("whole", "rounds", "processors")


def answer_all(pair: Pair, mode: str, num_questions: int, explain: Any) -> dict[str, Any]:
    """Return the seconds of some answers, those of their rounds, and their texts."""
    began, cpu_began, rounds_ms, texts = time.perf_counter(), time.process_time(), 0.0, []
    for seed in range(num_questions):
        document = generate_document(seed, 1000)
        told = pair.answer(
            document.questions[0].question, documents=[document.text], mode=mode, seed=seed,
            ignore_eos=True, max_tokens=NUM_TOKENS, explain=explain,
        )  # fmt: skip
        timings = told.receipt.timings_ms
        rounds_ms += timings["draft"] + timings["verify"]
        texts.append(told.text)
    return {
        "whole": time.perf_counter() - began,
        "rounds": rounds_ms / 1e3,
        "processors": time.process_time() - cpu_began,
        "texts": texts,
    }


def measure(pair: Pair, repeats: int, num_questions: int) -> dict[str, Any]:
    """Return the seconds of each mode in both ways, and their ratios."""
    report: dict[str, Any] = {}
    for mode in MODES:
        runs: dict[str, list[dict[str, Any]]] = {"none": [], "writers": []}
        answer_all(pair, mode, num_questions, "writers")  # reads the documents, and warms up
        for repeat in range(repeats):
            for explain in sorted(runs, reverse=bool(repeat % 2)):
                runs[explain].append(answer_all(pair, mode, num_questions, explain))
        assert len({str(run["texts"]) for way in runs.values() for run in way}) == 1
        report[mode] = {
            what: {way: spread([run[what] for run in took]) for way, took in runs.items()}
            | {"ratio": ratios(*([run[what] for run in runs[way]] for way in ("writers", "none")))}
            for what in MEASURED
        }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", default="embedded:target")
    parser.add_argument("--drafter", default="embedded:drafter")
    parser.add_argument("--quick", action="store_true", help="measure little, and keep nothing")
    options = parser.parse_args()
    repeats, num_questions = (2, 2) if options.quick else (15, 8)
    with rapid.open(options.target, drafter=options.drafter) as pair:
        report = measure(pair, repeats, num_questions)
    rows = [
        [mode, what, *(shown(told[what][way], 3) for way in ("none", "writers", "ratio"))]
        for mode, told in report.items()
        for what in MEASURED
    ]
    text = table(["mode", "what", "not explained, s", "explained, s", "ratio"], rows)
    name = None if options.quick else "explained"
    keep(name, "Explained answers beside others", text, report)


if __name__ == "__main__":
    main()
