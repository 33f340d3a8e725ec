"""The tokens of a step on this CPU: the row-by-row specification against what engines call.

    python -m benchmarks.decoding.sampling [--quick | --check]

Blocks of eight drafted tokens of one to six answers are judged, and one token each is drafted and
decoded, over vocabularies of 32,000 to 128,256 tokens. The rows are random, and the drafter's are
the target's with some noise, so most drafts are accepted. `by rows` is what engines run on a CPU.
Both must give the same answers, of which every one is compared. Times are those of one thread on
the processor, which other work on the machine changes less than times on the wall; the ways are
taken in turn within a repetition. Ratios are of neighbours in time, the specification's time over
that by rows.

It takes ten minutes on a busy machine, with `--quick` one. With `--check` nothing is timed: for
every coupling, rule and filter 10,000 random positions are judged by both ways, of rows that
are usual, flat, of few values, peaked over a flat tail, mostly impossible or far from zero.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import numpy as np
import torch

from benchmarks.reporting import keep, ratios, settings, shown, spread, table
from rapid.config import Coupling, SamplingConfig, SpeculationConfig
from rapid.speculation.acceptance import Judgement, decode_token, propose
from rapid.speculation.draw import Draw
from rapid.speculation.fast import step as step_module
from rapid.speculation.fast.step import answer_questions
from rapid.speculation.questions import Question, ToDecode, ToJudge, ToPropose
from rapid.speculation.sampling import proposal
from rapid.transfers import Transfer
from tests.rapid.speculation.drafted import ROWS, blocks, drafted

LENGTH = 8
WAYS = ("specification", "by rows")
WITNESSED = "fused, with a witness"
RULES = {
    "fused": SpeculationConfig(),
    WITNESSED: SpeculationConfig(),
    "boost": SpeculationConfig(transfer="boost"),
    "lossless": SpeculationConfig(eta=0),
    "lossless, shared noise": SpeculationConfig(eta=0, coupling="shared_noise"),
}
SAMPLINGS = {
    "sampled": SamplingConfig(seed=1),
    "greedy": SamplingConfig(temperature=0),
    "top_p 0.9": SamplingConfig(seed=1, top_p=0.9),
    "top_k 50": SamplingConfig(seed=1, top_k=50),
    "min_p 0.05": SamplingConfig(seed=1, min_p=0.05),
}


TRANSFERS = ("lossless", *get_args(Transfer))
CHECKED = [
    *SAMPLINGS.values(),
    SamplingConfig(top_p=0.999),
    SamplingConfig(top_k=1),
    SamplingConfig(top_k=20, top_p=0.5),
]


def specified(question: Question) -> Any:
    if isinstance(question, ToJudge):
        return question.by_specification()
    if isinstance(question, ToDecode):
        return decode_token(question.logits, question.draw)[0]
    ids, probs = proposal(question.logits, question.draw)
    return propose(ids, probs, question.draw)


def is_same(answer: Any, expected: Any) -> bool:
    """Return whether two answers are equal; the odds of `adaptive` but for their last bits."""
    if isinstance(answer, Judgement) and isinstance(expected, Judgement):
        return replace(answer, log_odds=expected.log_odds) == expected and math.isclose(
            answer.log_odds, expected.log_odds, rel_tol=1e-9, abs_tol=1e-9
        )
    return bool(getattr(answer, "token", answer) == getattr(expected, "token", expected))


def check(answers: Sequence[Any], expected: Sequence[Any], of: object) -> None:
    if not all(map(is_same, answers, expected)):
        raise SystemExit(f"the answers differ: {of}")


def asked(
    vocab: int, num_answers: int, draw: Draw, noise: float, *, is_witnessed: bool
) -> dict[str, list[Question]]:
    """Return the questions of three kinds of steps."""
    generator = torch.Generator().manual_seed(vocab + num_answers)
    steps: dict[str, list[Question]] = {"judge": [], "draft": [], "decode": []}
    for choice in range(num_answers):
        of_choice = Draw(draw.sampling, draw.speculation, choice, 0)
        target = torch.randn(LENGTH, vocab, generator=generator) * 5
        drafter = target + torch.randn(LENGTH, vocab, generator=generator) * noise
        rows = target.bfloat16().float()
        block = drafted(drafter.bfloat16().float(), of_choice)
        judging = ToJudge(block, rows, of_choice, frozenset())
        if is_witnessed:
            told = target + torch.randn(LENGTH, vocab, generator=generator) * noise
            judging = replace(judging, witness=told.bfloat16().float())
        steps["judge"].append(judging)
        steps["draft"].append(ToPropose(rows[0], of_choice))
        steps["decode"].append(ToDecode(rows[0], of_choice))
    return steps


def measured(questions: Sequence[Question], repeats: int) -> dict[str, Any]:
    """Return milliseconds of both ways, whose answers must be the same."""
    ways: dict[str, Callable[[], Any]] = {
        "specification": lambda: [specified(question) for question in questions],
        "by rows": lambda: answer_questions(questions),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    expected = ways["specification"]()
    for name, way in ways.items():
        check(way(), expected, name)
    for _ in range(repeats):
        for name, way in ways.items():
            began = time.thread_time()
            way()
            times[name].append((time.thread_time() - began) * 1e3)
    ratio = ratios(times["specification"], times["by rows"])
    return {**{name: spread(values) for name, values in times.items()}, "ratio": ratio}


def checked(num_positions: int, vocab: int) -> None:
    """Judge random positions of every coupling, rule and filter; any difference ends it."""
    numbers, asked = np.random.default_rng(0), [0]
    by_specification = ToJudge.by_specification

    def counted(self: ToJudge, *rest: Any, **rows: Any) -> Judgement:
        asked[0] += 1
        return by_specification(self, *rest, **rows)

    for coupling, transfer, sampling in product(get_args(Coupling), TRANSFERS, CHECKED):
        eta = 0.0 if transfer == "lossless" else 10.0
        form = "adaptive" if transfer == "lossless" else transfer
        speculation = SpeculationConfig(transfer=form, eta=eta, coupling=coupling)
        judged, asked[0] = 0, 0
        while judged < num_positions:
            warmth = 0.0 if sampling.temperature == 0 else float(numbers.choice([1, 0.7, 2, 0.05]))
            seed = int(numbers.integers(2**63))
            settled = sampling.model_copy(update={"temperature": warmth, "seed": seed})
            draws = [Draw(settled, speculation, choice, int(seed % 9973)) for choice in range(8)]
            rounds_to = torch.bfloat16 if numbers.random() < 0.5 else torch.float32
            kind = str(numbers.choice(list(ROWS)))
            rows = {"rounds_to": rounds_to, "kind": kind, "is_witnessed": numbers.random() < 0.5}
            questions = blocks(numbers, draws, vocab, **rows)
            expected = [question.by_specification() for question in questions]
            ToJudge.by_specification = counted  # type: ignore[method-assign]
            by_rows = answer_questions(questions)
            ToJudge.by_specification = by_specification  # type: ignore[method-assign]
            check(by_rows, expected, (speculation, settled, kind))
            judged += sum(len(one.token_ids) for one in expected)
        name = f"{transfer}, {coupling}, top_k {sampling.top_k}, top_p {sampling.top_p}"
        greedy = ", greedy" if sampling.temperature == 0 else ""
        share = asked[0] / judged
        print(f"{name}{greedy}: {judged} equal, {share:.2%} by the specification", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one vocabulary; nothing is written")
    parser.add_argument("--check", action="store_true", help="compare many random positions")
    parser.add_argument("--positions", type=int, default=10_000, help="of --check")
    parser.add_argument("--vocab", type=int, default=2_000, help="of --check")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--noise", type=float, default=0.1, help="of the drafter's logits")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.check:
        step_module._LONG = 0  # short vocabularies count as long
        with torch.inference_mode():
            checked(options.positions, options.vocab)
        return
    vocabularies = [32_000] if options.quick else [32_000, 128_256]
    rows, report = [], []
    for vocab in vocabularies:
        for num_answers in [6] if options.quick else [1, 6]:
            for rule, speculation in RULES.items():
                for sampling_name, sampling in SAMPLINGS.items():
                    draw = Draw(sampling, speculation, 0, 0)
                    with torch.inference_mode():
                        witnessed = {"is_witnessed": rule == WITNESSED}
                        steps = asked(vocab, num_answers, draw, options.noise, **witnessed)
                        for step, questions in steps.items():
                            if step != "judge" and rule != "lossless":
                                continue  # they hardly depend on the rule
                            result = measured(questions, options.repeats)
                            of = rule if step == "judge" else ""
                            times = [shown(result[name]) for name in WAYS]
                            ratio = shown(result["ratio"])
                            rows.append(
                                (step, of, sampling_name, vocab, num_answers, *times, ratio)
                            )
                            report.append(
                                {"step": step, "rule": rule, "sampling": sampling_name}
                                | {"vocab": vocab, "answers": num_answers, **result}
                            )
    times_of = [f"{name}, ms" for name in WAYS]
    header = ["step", "rule", "settings", "vocabulary", "answers", *times_of, "ratio"]
    keep(
        None if options.quick else "sampling",
        "The tokens of a step on a CPU",
        f"One thread, torch {torch.__version__}, {options.repeats} repetitions.\n\n"
        + table(header, rows),
        {"settings": settings(options), "measured": report},
    )


if __name__ == "__main__":
    main()
