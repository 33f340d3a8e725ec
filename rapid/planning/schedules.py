"""Schedules of drafting and verifying: the best draft length, speed and cost on given replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rapid.config import MAX_DRAFT
from rapid.planning.plan import Replica
from rapid.planning.speedups import compute_speedup, tokens_per_round

MAX_TARGETS = 32  # targets of one drafter, which all lose their drafts if it fails

Schedule = Literal["sequential", "draft ahead"]


@dataclass(frozen=True, slots=True)
class Speculating:
    """Conditions of speculation that determine its speedup, besides the two replicas."""

    batch: int  # sequences that the target decodes at once
    acceptance: float  # probability that a drafted token is accepted
    # See `compute_speedup`. None takes ``a^K``, the probability that the whole last block is
    # accepted, which the block drafted ahead relies on.
    hits: float | None = None
    extra_position: bool = False  # see `tokens_per_round`; for the sequential schedule only


@dataclass(frozen=True, slots=True)
class Operation:
    """The speed and cost of a schedule at its best draft length."""

    schedule: Schedule
    draft_length: int  # best draft length, in tokens
    speedup: float  # speedup over plain decoding of the same batch
    targets_per_drafter: int  # replicas of the target that one drafter drafts for in one batch
    gpu_seconds: float  # GPU-seconds per million tokens


def plain_gpu_seconds(target: Replica, batch: int) -> float:
    """Return the GPU-seconds of a million tokens without speculation."""
    return target.num_gpus * target.plain_s(batch) / batch * 1e6


def fastest(
    target: Replica,
    drafter: Replica,
    how: Speculating,
    schedule: Schedule,
    targets_per_drafter: int = 1,
) -> Operation:
    """Return the speed and cost of a schedule at its fastest draft length.

    The drafter has GPUs of its own or, with `num_gpus` 0, the target's.
    """
    times = {
        "target_s": target.plain_s(how.batch),
        "draft_s": drafter.draft_s(how.batch * targets_per_drafter),
        "round_s": target.losses.round_s,
    }

    def speedup(draft_length: int) -> float:
        is_ahead = schedule == "draft ahead"
        extra = how.extra_position and not is_ahead
        tokens = tokens_per_round(how.acceptance, draft_length, extra_position=extra)
        verify_s = target.verify_s(how.batch, draft_length + extra)
        hits = how.acceptance**draft_length if how.hits is None else how.hits
        return compute_speedup(tokens, draft_length, hits * is_ahead, verify_s=verify_s, **times)

    length = max(range(1, MAX_DRAFT + 1), key=speedup)
    best = speedup(length)
    gpus = target.num_gpus + drafter.num_gpus / targets_per_drafter
    gpu_seconds = gpus * times["target_s"] / (how.batch * best) * 1e6
    return Operation(schedule, length, best, targets_per_drafter, gpu_seconds)


def cheapest(target: Replica, drafter: Replica, how: Speculating, schedule: Schedule) -> Operation:
    """Choose the number of targets per drafter that needs the fewest GPU-seconds per token."""
    if not drafter.num_gpus:
        return fastest(target, drafter, how, schedule)
    # More targets share the drafter's GPUs and memory, but make its steps longer.
    most = max(1, min(MAX_TARGETS, drafter.max_sequences // how.batch))
    operations = (fastest(target, drafter, how, schedule, n) for n in range(1, most + 1))
    return min(operations, key=lambda each: each.gpu_seconds)
