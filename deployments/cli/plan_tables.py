"""The tables that ``rapid plan`` prints: memory, then speed and cost."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rich.table import Table

from deployments.cli.terminal import note, out, say

if TYPE_CHECKING:
    from rapid.planning.plan import Replica
    from rapid.planning.schedules import Schedule, Speculating

_GIB = 2**30  # bytes of a gibibyte


def beside(drafter: Replica, target: Replica) -> Replica:
    """Return a drafter on the target's GPUs."""
    return replace(drafter, num_gpus=target.num_gpus)


def show_memory(target: Replica, drafter: Replica, batch: int) -> str | None:
    """Print the memory of both replicas; return a sentence on the first misfit, if any."""
    table = _memory_table()
    problems = []
    for role, replica in (("target", target), ("drafter", drafter)):
        need, most = replica.need(batch), replica.max_sequences
        parts = (need.weights, need.kv_pool, need.work, need.total, replica.usable)
        table.add_row(
            role,
            str(replica.num_gpus),
            f"{replica.kv_per_sequence / _GIB:.2f}",
            *(f"{part / _GIB:.1f}" for part in parts),
            "yes" if most >= batch else "no",
            str(most),
        )
        if most < batch:
            problems.append(_misfit(role, replica, batch))
    out.print(table)
    return problems[0] if problems else None


def show_shared_memory(
    target: Replica, drafter: Replica, batch: int, *, is_one_model: bool
) -> str | None:
    """Print the memory of both models on the same GPUs; return a sentence if they do not fit."""
    ours, its = target.need(batch), beside(drafter, target).need(batch)
    weights = ours.weights + (0 if is_one_model else its.weights)
    work = ours.work + (0 if is_one_model else its.work)
    pools = ours.kv_pool + its.kv_pool
    total = weights + pools + work
    each = target.kv_per_sequence + drafter.kv_per_sequence
    common = target.kv_of(0)
    most = int(
        (target.usable - weights - work - common) // (target.kv_of(1) - common + drafter.kv_of(1))
    )
    table = _memory_table()
    table.add_row(
        "both",
        str(target.num_gpus),
        f"{each / _GIB:.2f}",
        *(f"{part / _GIB:.1f}" for part in (weights, pools, work, total, target.usable)),
        "yes" if total <= target.usable else "no",
        str(max(0, most)),
    )
    out.print(table)
    if total <= target.usable:
        return None
    return (
        f"target and drafter do not fit {target.num_gpus} {target.gpu.name} together: "
        f"{total / _GIB:.1f} GiB are needed, {target.usable / _GIB:.1f} usable; lower --batch to "
        f"{max(0, most)}, --context, or give the drafter GPUs of its own"
    )


def _memory_table() -> Table:
    return _table(
        "Memory of a replica, GiB",
        ("", "GPUs"),
        ("KV each", "weights", "KV pool", "work", "needed", "usable", "fits", "at most"),
    )


def _table(title: str, names: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for heading in names:
        table.add_column(heading, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def _misfit(role: str, replica: Replica, batch: int) -> str:
    from rapid.planning.plan import group_sizes

    need, most = replica.need(batch).total, replica.max_sequences
    enough = group_sizes(replica, batch)
    changes = [f"--batch {most}"] if most else []
    changes += [f"--{role}-gpus {enough[0]}"] if enough else []
    changes += [f"a shorter --{'' if role == 'target' else 'drafter-'}context"]
    changes += [f"--{role}-bits {bits}" for bits in (8, 4) if _fits(replica, bits, batch)][:1]
    return (
        f"the {role} does not fit {replica.num_gpus} {replica.gpu.name}: {batch} sequences need "
        f"{need / _GIB:.1f} GiB of {replica.usable / _GIB:.1f} usable; try {' or '.join(changes)}"
    )


def _fits(replica: Replica, bits: float, batch: int) -> bool:
    fewer = replace(replica, layer_bits=bits)
    return fewer.unpackable is None and fewer.max_sequences >= batch


def show_speed(target: Replica, drafter: Replica, how: Speculating, gpu_hour: float | None) -> None:
    """Print the speed of plain decoding and of each schedule, and what a million tokens cost."""
    from rapid.planning.schedules import cheapest, fastest, plain_gpu_seconds

    step_s, plain = target.step_s(how.batch), plain_gpu_seconds(target, how.batch)
    price = "" if gpu_hour is None else f", a price of {_cost(plain, gpu_hour):,.2f}"
    say(
        f"Plain: {step_s * 1e3:.1f} ms a step, {how.batch / step_s:.0f} tokens/s, "
        f"{plain:,.0f} GPU-s for a million tokens{price}. Prefill of one context: "
        f"{target.prefill_s():.1f} s at half the peak. Verifying takes no longer than that step up "
        f"to {target.free_rows(how.batch)} tokens a sequence."
    )
    cost = "GPU-s" if gpu_hour is None else "price"
    table = _table(
        f"Speculation at acceptance {how.acceptance:g}, against plain",
        ("drafter", "schedule"),
        ("draft ms", "length", "speedup", "cheapest", "speedup", f"{cost}/1M", "of plain"),
    )
    apart = drafter.num_gpus > 0
    best = 0.0
    schedules: tuple[Schedule, ...] = ("sequential", "draft ahead")
    for schedule in schedules[: 1 + apart]:
        quick = fastest(target, drafter, how, schedule)
        cheap = cheapest(target, drafter, how, schedule)
        best = max(best, quick.speedup)
        table.add_row(
            f"{drafter.num_gpus} GPU{'s' * (drafter.num_gpus > 1)}" if apart else "shares",
            schedule,
            f"{drafter.step_s(how.batch) * 1e3:.1f}",
            str(quick.draft_length),
            f"{quick.speedup:.2f}",
            f"1:{cheap.targets_per_drafter}" if apart else "",
            f"{cheap.speedup:.2f}",
            f"{_cost(cheap.gpu_seconds, gpu_hour):,.{0 if gpu_hour is None else 2}f}",
            f"{cheap.gpu_seconds / plain:.2f}",
        )
    out.print(table)
    if best < 1:
        is_larger = drafter.shape.num_parameters > target.shape.num_parameters
        what = "costs speed and buys quality" if is_larger else "costs speed"
        say(f"At batch {how.batch} this drafter {what}: at best {best:.2f} of plain decoding.")
    note(
        "speedup: one drafter for each target, at the best draft length. cheapest: drafters to "
        "targets where a token costs the least, the speedup and the cost there."
    )


def _cost(gpu_seconds: float, gpu_hour: float | None) -> float:
    """Return the cost in money where a price is given, else in GPU-seconds."""
    return gpu_seconds if gpu_hour is None else gpu_seconds / 3600 * gpu_hour
