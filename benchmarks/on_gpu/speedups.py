"""Speedups over plain decoding, measured in whole rounds with synthetic acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.on_gpu.bench import Bench, OutOfTime
from rapid.messages import DraftBlock
from rapid.planning.speedups import compute_speedup, tokens_per_round
from rapid.speculation.draw import Draw
from rapid.speculation.fast.step import answer_questions
from rapid.speculation.questions import ToDecode, ToJudge, ToPropose
from rapid.speculation.sampling import proposal

ACCEPTANCE = 0.77
MARK = f"synthetic acceptance {ACCEPTANCE}"
# These stand for `SamplingConfig()` and `SpeculationConfig(eta=0)` of rapid.config, which needs
# pydantic, with what judging reads: a property, and which tokens end an answer.
SAMPLING: Any = SimpleNamespace(
    temperature=1.0,
    top_p=1.0,
    top_k=None,
    seed=0,
    logit_bias=(),
    presence_penalty=0.0,
    frequency_penalty=0.0,
    min_tokens=0,
    allowed_token_ids=(),
    repetition_penalty=1.0,
    min_p=0.0,
    bad_words=(),
    thinking=None,
    stop_token_ids=(),
    ignore_eos=False,
    grammar=None,
    ends=frozenset,
)
LOSSLESS: Any = SimpleNamespace(
    rule="exact",
    transfer="adaptive",
    eta=0.0,
    max_draft=10,
    coupling="maximal",
    plausibility=0.1,
    draft_top_k=64,
    transfer_temperature=1.0,
    is_witnessed=False,
)
FUSED: Any = SimpleNamespace(**vars(LOSSLESS) | {"eta": 10.0, "is_witnessed": True})
METHODS = {"lossless": LOSSLESS, "fused with a witness": FUSED}
TEMPERATURES = (1.0, 0.7, 0.3, 0.0)  # of the sequences of a batch, in turn


def sequential(k: int, plain_ms: float, draft_ms: float, verify_ms: float) -> float:
    times = {"target_s": plain_ms, "draft_s": draft_ms, "verify_s": verify_ms}
    return compute_speedup(tokens_per_round(ACCEPTANCE, k), k, **times)


def verify_ms(times: dict[tuple[int, int, int], float], context: int, batch: int, k: int) -> float:
    """Return the time of verifying, as measured or interpolated between the measured neighbours."""
    known = sorted(rows for c, b, rows in times if (c, b) == (context, batch))
    points = [times[context, batch, rows] for rows in known]
    return float(np.interp(k, known, points))


def best(bench: Bench, context: int, batch: int, draft_ms: float) -> int:
    """Return the best draft length by the measured times of steps."""
    times = bench.step_ms
    most = max(rows for c, b, rows in times if (c, b) == (context, batch))
    plain = times[context, batch, 1]

    def speedup(k: int) -> float:
        return sequential(k, plain, draft_ms, verify_ms(times, context, batch, k))

    return max(range(1, most + 1), key=speedup)


def rounds(
    bench: Bench, name: str, context: int, batch: int, k: int, method: Any
) -> dict[str, float]:
    """Return milliseconds of a plain token and of a round, with the engines' work beside forwards.

    Drafts are proposed and drawn, blocks are judged, and plain tokens are drawn, each for all
    sequences of a step at once. The accepted tokens are not used, because they mean nothing with
    random weights.
    """
    target, drafter, vocab = bench.models["8B"], bench.models[name], bench.plan.vocab_size
    run_target, run_drafter = target.runner(), drafter.runner()
    plain_feeds = target.feeds(context, batch, 1)
    draft_feeds = drafter.feeds(bench.plan.draft_context, batch, 1)
    block_feeds = target.feeds(context, batch, k)
    witness_feeds = target.feeds(bench.plan.draft_context, batch, k) if method.is_witnessed else []

    def draw_of(choice: int, position: int = 0) -> Draw:
        sampling = SimpleNamespace(**vars(SAMPLING))
        sampling.temperature = TEMPERATURES[choice % len(TEMPERATURES)]
        return Draw(sampling, method, choice, position)

    def judge(blocks: Sequence[DraftBlock]) -> list[ToJudge]:
        found = run_target.run(block_feeds + witness_feeds)
        witnesses = found[batch:] or [None] * batch
        return [
            ToJudge(block, logits, draw_of(choice), {vocab}, witness=witness)
            for choice, (block, logits, witness) in enumerate(
                zip(blocks, found[:batch], witnesses, strict=True)
            )
        ]

    def plain() -> None:
        rows = enumerate(run_target.run(plain_feeds))
        answer_questions([ToDecode(row[0], draw_of(choice)) for choice, row in rows])

    def one_round() -> None:
        drawn: list[list[tuple[Any, Any, int]]] = [[] for _ in range(batch)]
        for position in range(k):
            asked = [
                ToPropose(logits[0], draw_of(choice, position))
                for choice, logits in enumerate(run_drafter.run(draft_feeds))
            ]
            for block, one in zip(drawn, answer_questions(asked), strict=True):
                block.append((one.candidate_ids, one.candidate_probs, one.token))
        answer_questions(judge([block_of(one, choice) for choice, one in enumerate(drawn)]))

    told = []
    for choice, logits in enumerate(run_target.run(block_feeds)):
        ids, probs = proposal(logits[0], draw_of(choice))
        told.append(block_of([(ids, probs, int(ids[0]))] * k, choice))
    asked = [
        replace(
            one,
            logits=one.logits.clone(),
            witness=None if one.witness is None else one.witness.clone(),
        )
        for one in judge(told)
    ]

    def judging() -> None:
        answer_questions(asked)

    return {
        "plain": bench.wall_ms(plain, warm=6),
        "round": bench.wall_ms(one_round, warm=6),
        "judging the blocks": bench.wall_ms(judging),
    }


def block_of(drawn: Sequence[tuple[Any, Any, int]], choice: int) -> DraftBlock:
    width = max(len(ids) for ids, _, _ in drawn)
    candidate_ids = np.full((len(drawn), width), -1, dtype=np.int32)
    candidate_probs = np.zeros((len(drawn), width), dtype=np.float32)
    for row, (ids, probs, _) in enumerate(drawn):
        candidate_ids[row, : len(ids)], candidate_probs[row, : len(ids)] = ids, probs
    return DraftBlock(
        lease_id="",
        choice=choice,
        position=0,
        token_ids=np.asarray([token for *_, token in drawn], dtype=np.int32),
        candidate_ids=candidate_ids,
        candidate_probs=candidate_probs,
        draft_ms=0.0,
    )


def speedups(bench: Bench) -> None:
    """Report the numbers that have goals; acceptance is synthetic in all that involve drafts."""
    context, times = bench.plan.contexts[0], bench.step_ms
    # These are the batches whose steps were measured at every number of rows.
    batches = sorted({b for c, b, rows in times if c == context and rows == max(bench.plan.rows)})
    if not batches:
        raise OutOfTime("no step times")
    target, large = bench.models["8B"], max(batches)
    for batch in batches:
        ratio = verify_ms(times, context, batch, 8) / times[context, batch, 1]
        bench.say(
            f"verify 8 over decode 1, {batch} x {context}", f"{ratio:.2f}", "<= 1.15", ratio <= 1.15
        )
    share = target.least_ms(context, large) / times[context, large, 1]
    bench.say(
        f"plain against the bytes, {large} x {context}", f"{share:.0%}", ">= 60 %", share >= 0.6
    )
    for place in sorted({(c, b) for c, b, rows in times if rows == 8 and b in (1, large)}):
        for told in METHODS:
            bench.check_time(10, "rounds")
            measured_speedup(bench, "1B", *place, told)
    bench.check_time(10, "rounds")
    measured_speedup(bench, "8B", context, large, "lossless")


def measured_speedup(bench: Bench, name: str, context: int, batch: int, told: str) -> None:
    """Report the speedup of whole rounds, at the draft length that is best by the steps."""
    draft_ms = bench.draft_ms[name][batch]
    k = best(bench, context, batch, draft_ms)
    ms = rounds(bench, name, context, batch, k, METHODS[told])
    measured = tokens_per_round(ACCEPTANCE, k) * ms["plain"] / ms["round"]
    bench.report.setdefault("rounds", []).append(
        {"drafter": name, "context": context, "batch": batch, "method": told}
        | {"draft_length": k, "ms": ms}
    )
    verifying = verify_ms(bench.step_ms, context, batch, k)
    bench.lose("sampling_s", ms["plain"] - bench.step_ms[context, batch, 1])
    bench.lose("judging_s", ms["judging the blocks"])
    bench.lose("drafting_s", (ms["round"] - verifying - ms["judging the blocks"]) / k - draft_ms)
    is_asked = name == "1B" and batch == 1 and context == bench.plan.contexts[0]
    is_asked = is_asked and told == "lossless"
    bench.say(
        f"{told}, whole rounds, {name} drafter, {batch} x {context}",
        f"{measured:.2f}x at {k}: a round {ms['round']:.1f} ms, a plain token "
        f"{ms['plain']:.1f}, judging the blocks {ms['judging the blocks']:.1f} ({MARK})",
        ">= 1.2x" if is_asked else "",
        measured >= 1.2 if is_asked else None,
    )
