"""The tokens of a step on this CPU: the row-by-row specification against what engines call.

    python benchmarks/sampling.py [--quick]

Blocks of eight drafted tokens of one to six answers are judged, and one token each is drafted and
decoded, over vocabularies of 32,000 to 128,256 tokens. The rows are random, and the drafter's are
the target's with some noise, so most drafts are accepted. `by rows` is what engines run on a CPU.
`together` is what they run on CUDA, here on the CPU. All three must give the same answers, of which
every one is compared. Times are those of one thread on the processor, which other work on the
machine changes less than times on the wall; the ways are taken in turn within a repetition. Ratios
are of neighbours in time, the specification's time over that by rows.

It takes ten minutes on a busy machine, with `--quick` one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from reporting import keep, ratios, settings, shown, spread, table

from rapid.config import SamplingConfig, SpeculationConfig
from rapid.speculation.acceptance import decode_token, propose
from rapid.speculation.draw import Draw
from rapid.speculation.questions import Question, ToDecode, ToJudge, ToPropose
from rapid.speculation.sampling import proposal
from rapid.speculation.step import answered, answered_together

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.rapid.speculation.drafted import drafted

LENGTH = 8
WAYS = ("specification", "by rows", "together")
RULES = {
    "fused": SpeculationConfig(),
    "boost": SpeculationConfig(transfer="boost"),
    "lossless": SpeculationConfig(eta=0),
    "lossless, shared noise": SpeculationConfig(eta=0, coupling="shared_noise"),
}
SAMPLINGS = {
    "sampled": SamplingConfig(seed=1),
    "greedy": SamplingConfig(temperature=0),
    "top_p 0.9": SamplingConfig(seed=1, top_p=0.9),
    "top_k 50": SamplingConfig(seed=1, top_k=50),
}


def specified(question: Question) -> Any:
    if isinstance(question, ToJudge):
        return question.by_specification()
    if isinstance(question, ToDecode):
        return decode_token(question.logits, question.draw)[0]
    ids, probs = proposal(question.logits, question.draw)
    return propose(ids, probs, question.draw)


def told(answer: Any) -> Any:
    return getattr(answer, "token", answer)


def asked(vocab: int, num_answers: int, draw: Draw, noise: float) -> dict[str, list[Question]]:
    """Return the questions of three kinds of steps."""
    generator = torch.Generator().manual_seed(vocab + num_answers)
    steps: dict[str, list[Question]] = {"judge": [], "draft": [], "decode": []}
    for choice in range(num_answers):
        of_choice = Draw(draw.sampling, draw.speculation, choice, 0)
        target = torch.randn(LENGTH, vocab, generator=generator) * 5
        drafter = target + torch.randn(LENGTH, vocab, generator=generator) * noise
        rows = target.bfloat16().float()
        block = drafted(drafter.bfloat16().float(), of_choice)
        steps["judge"].append(ToJudge(block, rows, of_choice, frozenset()))
        steps["draft"].append(ToPropose(rows[0], of_choice))
        steps["decode"].append(ToDecode(rows[0], of_choice))
    return steps


def measured(questions: Sequence[Question], repeats: int) -> dict[str, Any]:
    """Return milliseconds of the three ways, whose answers must be the same."""
    ways: dict[str, Callable[[], Any]] = {
        "specification": lambda: [specified(question) for question in questions],
        "by rows": lambda: answered(questions),
        "together": lambda: answered_together(questions),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    answers = [[told(one) for one in way()] for way in ways.values()]
    if not answers[0] == answers[1] == answers[2]:
        raise SystemExit("the answers differ")
    for _ in range(repeats):
        for name, way in ways.items():
            began = time.thread_time()
            way()
            times[name].append((time.thread_time() - began) * 1e3)
    ratio = ratios(times["specification"], times["by rows"])
    return {**{name: spread(values) for name, values in times.items()}, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one vocabulary; nothing is written")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--noise", type=float, default=0.1, help="of the drafter's logits")
    options = parser.parse_args()
    torch.set_num_threads(1)
    vocabularies = [32_000] if options.quick else [32_000, 128_256]
    rows, report = [], []
    for vocab in vocabularies:
        for num_answers in [6] if options.quick else [1, 6]:
            for rule, speculation in RULES.items():
                for sampling_name, sampling in SAMPLINGS.items():
                    draw = Draw(sampling, speculation, 0, 0)
                    with torch.inference_mode():
                        steps = asked(vocab, num_answers, draw, options.noise)
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
