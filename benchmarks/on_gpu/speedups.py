"""Speedups over plain decoding: modelled from the measured steps, and measured in whole rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.on_gpu.bench import Bench, OutOfTime
from rapid.messages import DraftBlock
from rapid.planning.speedups import draft_ahead_speedup, sequential_speedup, tokens_per_round
from rapid.speculation.draw import Draw
from rapid.speculation.fast.step import answer_questions
from rapid.speculation.questions import ToDecode, ToJudge, ToPropose
from rapid.speculation.sampling import proposal

ACCEPTANCE = 0.77
MARK = f"synthetic acceptance {ACCEPTANCE}"
# These stand for `SamplingConfig()` and `SpeculationConfig(eta=0)` of rapid.config, which needs
# pydantic, with the property that judging reads.
SAMPLING: Any = SimpleNamespace(temperature=1.0, top_p=1.0, top_k=None, seed=0, logit_bias=())
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


def sequential(k: int, plain_ms: float, draft_ms: float, verify_ms: float) -> float:
    times = {"target_s": plain_ms, "draft_s": draft_ms, "verify_s": verify_ms}
    return sequential_speedup(tokens_per_round(ACCEPTANCE, k), k, **times)


def ahead(k: int, plain_ms: float, draft_ms: float, verify_ms: float) -> float:
    """Return the speedup of drafting ahead, as if all were accepted, on a device of its own."""
    times = {"target_s": plain_ms, "draft_s": draft_ms, "verify_s": verify_ms}
    return draft_ahead_speedup(tokens_per_round(ACCEPTANCE, k), k, ACCEPTANCE**k, **times)


def verify_ms(times: dict[tuple[int, int, int], float], context: int, batch: int, k: int) -> float:
    """Return the time of verifying, as measured or interpolated between the measured neighbours."""
    known = sorted(rows for c, b, rows in times if (c, b) == (context, batch))
    points = [times[context, batch, rows] for rows in known]
    return float(np.interp(k, known, points))


def best(
    speedup: Callable[[int, float, float, float], float],
    times: dict[tuple[int, int, int], float],
    context: int,
    batch: int,
    draft_ms: float,
) -> tuple[int, float]:
    """Return the best draft length and its speedup, from measured times."""
    plain = times[context, batch, 1]
    lengths = range(1, max(rows for c, b, rows in times if (c, b) == (context, batch)) + 1)
    found = {k: speedup(k, plain, draft_ms, verify_ms(times, context, batch, k)) for k in lengths}
    length = max(found, key=lambda k: found[k])
    return length, found[length]


def roofline_speedup(bench: Bench, name: str, context: int, batch: int) -> float:
    plain = bench.models["8B"].least_ms(context, batch)
    draft = bench.models[name].least_ms(bench.plan.draft_context, batch)
    return max(sequential(k, plain, draft, plain) for k in range(1, 17))


def rounds(bench: Bench, name: str, context: int, batch: int, k: int) -> dict[str, float]:
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

    def plain() -> None:
        rows = enumerate(run_target.run(plain_feeds))
        answer_questions(
            [ToDecode(row[0], Draw(SAMPLING, LOSSLESS, choice, 0)) for choice, row in rows]
        )

    def one_round() -> None:
        drawn: list[list[tuple[Any, Any, int]]] = [[] for _ in range(batch)]
        for position in range(k):
            asked = [
                ToPropose(logits[0], Draw(SAMPLING, LOSSLESS, choice, position))
                for choice, logits in enumerate(run_drafter.run(draft_feeds))
            ]
            for block, one in zip(drawn, answer_questions(asked), strict=True):
                block.append((one.candidate_ids, one.candidate_probs, one.token))
        answer_questions(
            [
                ToJudge(block_of(drawn[choice], choice), logits, first_of(choice), {vocab})
                for choice, logits in enumerate(run_target.run(block_feeds))
            ]
        )

    def judging() -> None:
        answer_questions(blocks)

    def first_of(choice: int) -> Draw:
        return Draw(SAMPLING, LOSSLESS, choice, 0)

    blocks = []
    for choice, logits in enumerate(run_target.run(block_feeds)):
        ids, probs = proposal(logits[0], first_of(choice))
        block = block_of([(ids, probs, int(ids[0]))] * k, choice)
        blocks.append(ToJudge(block, logits.clone(), first_of(choice), {vocab}))
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
    pairs = [(name, b) for name in bench.draft_ms for b in batches if b in bench.draft_ms[name]]
    for name, batch in pairs:
        modelled_speedups(bench, name, batch, is_large=batch == large)
    for name, batch in reversed(pairs):  # the 1B's first, since it has a goal
        bench.check_time(20, "rounds")
        measured_speedup(bench, name, batch)


def modelled_speedups(bench: Bench, name: str, batch: int, *, is_large: bool) -> None:
    """Report speedups modelled from the measured steps alone."""
    context, times = bench.plan.contexts[0], bench.step_ms
    draft_ms = bench.draft_ms[name][batch]
    told = f"{name} drafter, {batch} x {context}"
    k, modelled = best(sequential, times, context, batch, draft_ms)
    limit = roofline_speedup(bench, name, context, batch)
    bench.say(
        f"sequential, forwards only, {told}",
        f"{modelled:.2f}x at {k} of at best {limit:.2f}x by bytes ({MARK})",
        ">= 80 % of the bytes' speedup" if is_large else "",
        modelled >= 0.8 * limit if is_large else None,
    )
    k, modelled = best(ahead, times, context, batch, draft_ms)
    is_asked = is_large and name == "1B"
    bench.say(
        f"draft-ahead, own GPU, {told}",
        f"{modelled:.2f}x at {k} (modelled from these steps; {MARK})",
        ">= 2.3x" if is_asked else "",
        modelled >= 2.3 if is_asked else None,
    )


def measured_speedup(bench: Bench, name: str, batch: int) -> None:
    """Report the speedup of whole rounds, at the draft length that is best by the steps."""
    context, draft_ms = bench.plan.contexts[0], bench.draft_ms[name][batch]
    k, _ = best(sequential, bench.step_ms, context, batch, draft_ms)
    ms = rounds(bench, name, context, batch, k)
    measured = tokens_per_round(ACCEPTANCE, k) * ms["plain"] / ms["round"]
    bench.report.setdefault("rounds", []).append(
        {"drafter": name, "batch": batch, "draft_length": k, "ms": ms}
    )
    is_asked = name == "1B" and batch == 1
    bench.say(
        f"sequential, whole rounds, {name} drafter, {batch} x {context}",
        f"{measured:.2f}x at {k}: a round {ms['round']:.1f} ms, a plain token "
        f"{ms['plain']:.1f}, judging the blocks {ms['judging the blocks']:.1f} ({MARK})",
        ">= 1.2x" if is_asked else "",
        measured >= 1.2 if is_asked else None,
    )
