"""Decoding in one process against Hugging Face's `generate`, on a CPU, with equal weights and KV.

    python -m benchmarks.decoding.decode [--quick] [--cases 1] [--threads 2]

plain     our step: one sequence, and several at once, on documents of their own or on one
lossless  draft, verify, commit, with a drafter that reads a sixteenth of the context
ahead     the same, but the drafter goes on while its block is judged
dynamic   `generate` with its default cache, which is copied for every token
static    `generate` with a static cache of exactly the room needed
assisted  `generate(assistant_model=...)`: the same drafter, which reads all that the target reads

The weights are random (4 layers of 8 heads and 4 KV heads of 64; the drafter has one layer) and the
KV of the prompts is drawn, not computed (`filled.py`); the embedded target is measured too. All
arms run in turn within a repetition, and a ratio is the median of the repetitions' own ratios.
Times exclude the first token, and for `generate` also its set-up. All decoding is greedy.

Models with random weights do not agree, so in the second table target and drafter follow scripts
that agree at a share alpha of the positions (`filled.scripted`): **synthetic acceptance**, real
work. Every engine then has one thread: in a team of two, one thread would wait for the other, whose
core another engine uses. The bound is the speedup of a round that consists of nothing but its
forwards, each at its best of this run, with the run's own tokens per round. It is given for one
sequence only, because several share their forwards.

It takes about 10 minutes on two cores, with `--quick` one and a half.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time
from typing import Any

import torch
import transformers

from benchmarks.decoding.decoding_arms import (
    ALPHA,
    MAX_DRAFT,
    Arm,
    Run,
    assisted,
    generated,
    lossless,
    plain,
    scripts,
)
from benchmarks.engine.filled import (
    FilledEngine,
    Model,
    dynamic_cache,
    embedded_target,
    random_model,
    static_cache,
)
from benchmarks.reporting import keep, ratios, shown, spread, table

TARGET = {"hidden_size": 512, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4}
DRAFTER = {"hidden_size": 256, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2}
ROOM = 64  # maximum tokens of an answer
QUESTION = 64  # tokens after a document that several sequences have in common
ONE_DOCUMENT = "embedded, one document"


async def in_turn(arms: dict[str, Arm], repeats: int) -> dict[str, list[Run]]:
    """Run every arm once per repetition, after a repetition that does not count."""
    runs: dict[str, list[Run]] = {name: [] for name in arms}
    for repeat in range(repeats + 1):
        for name, arm in arms.items():
            gc.collect()
            run = await arm()
            if repeat:
                runs[name].append(run)
    return runs


def times(runs: dict[str, list[Run]]) -> dict[str, Any]:
    """Return milliseconds per step of every arm, and ratios of its time to that of `plain`."""
    of_plain = [run.ms for run in runs["plain"]]
    return {
        "ms": {name: spread([run.ms for run in each]) for name, each in runs.items()},
        "cpu_ms": {name: spread([run.cpu_ms for run in each]) for name, each in runs.items()},
        "over_plain": {
            name: ratios([run.ms for run in each], of_plain)
            for name, each in runs.items()
            if name != "plain"
        },
    }


def num_equal(ours: list[int], theirs: list[int]) -> int:
    """Return the number of leading tokens that are equal."""
    return next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours)
    )


async def against_generate(
    model: Model,
    length: int,
    *,
    batch: int,
    shared: int,
    num_tokens: int,
    repeats: int,
    threads: int,
) -> dict[str, Any]:
    """Compare `plain` with `generate` on both caches."""
    filled = FilledEngine(
        model.ours, length, batch=batch, room=ROOM, threads=threads, shared=shared
    )
    try:
        await filled.open()
        kv = filled.kv()
        arms = {
            "plain": plain(filled, num_tokens),
            "dynamic": generated(model, filled, dynamic_cache(model, kv), num_tokens),
            "static": generated(model, filled, static_cache(model, kv, ROOM), num_tokens),
        }
        del kv
        runs = await in_turn(arms, repeats)
    finally:
        filled.close()
    ours = runs["plain"][0].token_ids
    return times(runs) | {
        "equal_tokens": {
            name: f"{num_equal(ours, runs[name][0].token_ids)} of {num_tokens}"
            for name in ("dynamic", "static")
        }
    }


async def speculating(
    target: Model,
    drafter: Model,
    length: int,
    *,
    batch: int,
    num_tokens: int,
    repeats: int,
    with_assisted: bool,
) -> dict[str, Any]:
    """Compare `lossless` with `plain`, and with the bound that this run's own times set."""
    both = {"batch": batch, "room": ROOM, "max_draft": MAX_DRAFT}
    long = FilledEngine(target.ours, length, **both)
    short, ahead = (
        FilledEngine(drafter.ours, max(length // 16, 64), draft_ahead=draft_ahead, **both)
        for draft_ahead in (False, True)
    )
    right, drafted = scripts(ROOM + 2 * MAX_DRAFT, target.ours.vocab_size)
    try:
        for filled, script in ((long, right), (short, drafted), (ahead, drafted)):
            await filled.open()
            filled.script(script)
        arms = {
            "plain": plain(long, num_tokens),
            "lossless": lossless(long, short, num_tokens),
            "ahead": lossless(long, ahead, num_tokens),
        }
        if with_assisted:
            arms["assisted"] = assisted(target, drafter, long, right, drafted, num_tokens)
        runs = await in_turn(arms, repeats)
    finally:
        for filled in (long, short, ahead):
            filled.close()
    for name, each in runs.items():
        for run in each:
            assert run.token_ids[:num_tokens] == right[:num_tokens], f"{name} left its script"
    return times(runs) | {"sequences": batch} | of_rounds(runs, is_alone=batch == 1)


def of_rounds(runs: dict[str, list[Run]], *, is_alone: bool) -> dict[str, Any]:
    """Return the speedup of rounds and, for one sequence, its bound."""
    verdicts = [verdict for run in runs["lossless"] for verdict in run.verdicts]
    per_round = sum(len(verdict.token_ids) for verdict in verdicts) / len(verdicts)
    gained = [a.ms / b.ms for a, b in zip(runs["plain"], runs["lossless"], strict=True)]
    told = {"tokens_per_round": round(per_round, 2), "speedup": spread(gained)}
    if not is_alone:
        return told
    whole = [verdict for verdict in verdicts if verdict.num_drafted == MAX_DRAFT]
    best = {
        "plain_ms": min(run.ms for run in runs["plain"]),
        "draft_ms": min(verdict.draft_ms for verdict in whole),
        "verify_ms": min(verdict.verify_ms for verdict in whole),
    }
    bound = best["plain_ms"] * per_round / (best["draft_ms"] + best["verify_ms"])
    return told | {
        "best": {name: round(value, 3) for name, value in best.items()},
        "bound": round(bound, 3),
        "share_of_bound": round(statistics.median(gained) / bound, 3),
    }


def table_of_plain(cases: list[dict[str, Any]]) -> str:
    """Return a table of milliseconds per step, and how many times faster `plain` is."""
    rows = [
        [
            case["model"],
            case["dtype"],
            case["length"],
            case["batch"],
            shown(case["ms"]["plain"]),
            *(shown(case["over_plain"][name]) for name in ("dynamic", "static")),
            f"{1e3 * case['batch'] / case['ms']['plain']['median']:.0f}",
            case["equal_tokens"]["dynamic"],
        ]
        for case in cases
    ]
    header = ["model", "dtype", "tokens of context", "sequences", "plain, ms a step",
              "`generate` / plain", "static cache / plain", "plain, tokens/s",
              "tokens equal to `generate`'s"]  # fmt: skip
    return table(header, rows)


def table_of_lossless(cases: list[dict[str, Any]]) -> str:
    """Return a table of speedups over our own plain decoding, with the bound."""

    def speedup(case: dict[str, Any], name: str) -> str:
        over = case["over_plain"].get(name)
        return f"{1 / over['median']:.2f}" if over else ""

    rows = [
        [
            case["dtype"],
            case["length"],
            case["sequences"],
            shown(case["ms"]["plain"]),
            shown(case["speedup"]),
            case["tokens_per_round"],
            case.get("bound", ""),
            case.get("share_of_bound", ""),
            " / ".join(f"{ms:.1f}" for ms in case["best"].values()) if "best" in case else "",
            speedup(case, "ahead"),
            speedup(case, "assisted"),
        ]
        for case in cases
    ]
    header = ["dtype", "tokens of context", "sequences", "plain, ms a token", "lossless: speedup",
              "tokens a round", "bound", "share of it", "best ms: plain / draft / verify",
              "drafting ahead: speedup", "assisted `generate`: speedup"]  # fmt: skip
    return table(header, rows)


def throughput(cases: list[dict[str, Any]]) -> str:
    """Return the throughput of several sequences over that of one, where both were measured."""
    lines = []
    for case in cases:
        alone = next(
            one
            for one in cases
            if one["batch"] == 1
            and all(one[key] == case[key] for key in ("model", "dtype", "length"))
        )
        if case["batch"] > 1:
            ratio = case["batch"] * alone["ms"]["plain"]["median"] / case["ms"]["plain"]["median"]
            lines.append(
                f"- {case['model']}, {case['dtype']}, {case['length']} tokens: {case['batch']} "
                f"sequences {ratio:.2f}x\n"
            )
    return "".join(lines)


Case = tuple[str, str, int, int]  # model, dtype, tokens of context, sequences
DTYPES = ("float32", "bfloat16")
FULL_PLAIN: list[Case] = [
    ("embedded", dtype, length, batch)
    for dtype in DTYPES
    for length in (1024, 4096)
    for batch in (1, 4, 8)
]
FULL_PLAIN += [(ONE_DOCUMENT, dtype, 4096, batch) for dtype in DTYPES for batch in (1, 4, 8)]
FULL_PLAIN += [
    ("random", dtype, length, batch)
    for dtype in DTYPES
    for length, batch in ((1024, 1), (1024, 4), (4096, 1), (4096, 4), (4096, 8), (16384, 1),
                          (32768, 1), (65536, 1))
]  # fmt: skip
QUICK_PLAIN: list[Case] = [
    ("embedded", "float32", 4096, 1),
    ("embedded", "float32", 4096, 4),
    (ONE_DOCUMENT, "float32", 4096, 1),
    (ONE_DOCUMENT, "float32", 4096, 4),
    ("random", "float32", 1024, 1),
    ("random", "float32", 32768, 1),
    ("random", "bfloat16", 4096, 1),
    ("random", "bfloat16", 32768, 1),
]
FULL_LOSSLESS = [
    (dtype, length, batch)
    for dtype in DTYPES
    for length, batch in ((1024, 1), (4096, 1), (4096, 4), (16384, 1), (65536, 1))
]
QUICK_LOSSLESS = [("bfloat16", 4096, 1), ("bfloat16", 32768, 1)]


async def measure(is_quick: bool, threads: int, most_cases: int | None) -> dict[str, Any]:
    """Measure all cases, or the first of each table, one after the other."""
    repeats = 3 if is_quick else 5
    plain_cases, lossless_cases = [], []
    for name, dtype, length, batch in (QUICK_PLAIN if is_quick else FULL_PLAIN)[:most_cases]:
        # The trained model has 8192 positions; its prompts leave room for the answer in 4096.
        length -= ROOM if name != "random" else 0
        model = random_model(dtype, **TARGET) if name == "random" else embedded_target(dtype)
        case = await against_generate(
            model,
            length,
            batch=batch,
            shared=length - QUESTION if name == ONE_DOCUMENT else 0,
            num_tokens=10 if length > 16384 else 40,
            repeats=repeats,
            threads=threads,
        )
        plain_cases.append({"model": name, "dtype": dtype, "length": length, "batch": batch} | case)
        print(table_of_plain(plain_cases[-1:]).splitlines()[-1], flush=True)
    for dtype, length, batch in (QUICK_LOSSLESS if is_quick else FULL_LOSSLESS)[:most_cases]:
        case = await speculating(
            random_model(dtype, **TARGET),
            random_model(dtype, **DRAFTER),
            length,
            batch=batch,
            num_tokens=32 if is_quick else 48,
            repeats=repeats,
            with_assisted=length <= 4096 and batch == 1,
        )
        lossless_cases.append({"dtype": dtype, "length": length} | case)
        print(table_of_lossless(lossless_cases[-1:]).splitlines()[-1], flush=True)
    return {"plain": plain_cases, "lossless": lossless_cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases, nothing kept")
    parser.add_argument("--cases", type=int, help="of each table, the first so many")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # for this thread, which only waits; the engine's has its own
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    began = time.perf_counter()
    cases = asyncio.run(measure(arguments.quick, arguments.threads, arguments.cases))
    text = (
        f"torch {torch.__version__}, transformers "
        f"{transformers.__version__}. Medians, in brackets the least and the most of the "
        "repetitions; ratios are of neighbours in time.\n\n"
        f"## Plain\n\n{arguments.threads} threads.\n\n{table_of_plain(cases['plain'])}\n"
        "Tokens per second of several sequences over those of one:\n\n"
        f"{throughput(cases['plain'])}\n"
        f"## Lossless, synthetic acceptance {ALPHA}, {MAX_DRAFT} tokens a block\n\n"
        "One thread an engine.\n\n"
        f"{table_of_lossless(cases['lossless'])}"
    )
    report = cases | {
        "threads": arguments.threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "target": TARGET,
        "drafter": DRAFTER,
        "alpha": ALPHA,
        "max_draft": MAX_DRAFT,
        "seconds": round(time.perf_counter() - began),
    }
    keep(None if arguments.quick else "decode", "Decoding in process", text, report)


if __name__ == "__main__":
    main()
