"""The tables that ``rapid plan`` prints: memory, then speed and cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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
    replicas = {"target": target, "drafter": drafter}
    needs = {role: _memory_object(replica, batch) for role, replica in replicas.items()}
    out.print(_memory_table(needs))
    misfits = [role for role, need in needs.items() if not need["fits"]]
    return _misfit(misfits[0], replicas[misfits[0]], batch) if misfits else None


def show_shared_memory(
    target: Replica, drafter: Replica, batch: int, *, is_one_model: bool
) -> str | None:
    """Print the memory of both models on the same GPUs; return a sentence if they do not fit."""
    both = _share_memory(target, drafter, batch, is_one_model=is_one_model)
    out.print(_memory_table({"both": both}))
    if both["fits"]:
        return None
    return (
        f"target and drafter do not fit {target.num_gpus} {target.gpu.name} together: "
        f"{both['needed'] / _GIB:.1f} GiB are needed, {target.usable / _GIB:.1f} usable; lower "
        f"--batch to {both['max_sequences']}, --context, or give the drafter GPUs of its own"
    )


def _share_memory(
    target: Replica, drafter: Replica, batch: int, *, is_one_model: bool
) -> dict[str, Any]:
    """Return the memory that both models need on the same GPUs, in bytes."""
    ours, its = target.need(batch), beside(drafter, target).need(batch)
    weights = ours.weights + (0 if is_one_model else its.weights)
    work = ours.work + (0 if is_one_model else its.work)
    pools = ours.kv_pool + its.kv_pool
    total = weights + pools + work
    common = target.kv_of(0)
    most = int(
        (target.usable - weights - work - common) // (target.kv_of(1) - common + drafter.kv_of(1))
    )
    return {
        "gpus": target.num_gpus,
        "kv_each": target.kv_per_sequence + drafter.kv_per_sequence,
        "weights": weights,
        "kv_pool": pools,
        "work": work,
        "needed": total,
        "usable": target.usable,
        "fits": total <= target.usable,
        "max_sequences": max(0, most),
    }


def plan_object(
    limit: tuple[Replica, Replica],
    likely: tuple[Replica, Replica],
    how: Speculating,
    *,
    is_one_model: bool,
) -> dict[str, Any]:
    """Return the numbers of the tables, for programs: bytes, seconds, GPU-seconds and ratios."""
    target, drafter = limit
    if drafter.num_gpus:
        memory = {"target": target, "drafter": drafter}
        told = {role: _memory_object(each, how.batch) for role, each in memory.items()}
    else:
        shared = _share_memory(target, drafter, how.batch, is_one_model=is_one_model)
        told = {"both": shared}
    return {
        "memory_bytes": told,
        "limit": _describe_speed(*limit, how),
        "likely": _describe_speed(*likely, how),
    }


def _memory_object(replica: Replica, batch: int) -> dict[str, Any]:
    need, most = replica.need(batch), replica.max_sequences
    return {
        "gpus": replica.num_gpus,
        "kv_each": replica.kv_per_sequence,
        "weights": need.weights,
        "kv_pool": need.kv_pool,
        "work": need.work,
        "needed": need.total,
        "usable": replica.usable,
        "fits": most >= batch,
        "max_sequences": most,
    }


def _describe_speed(target: Replica, drafter: Replica, how: Speculating) -> dict[str, Any]:
    from rapid.planning.schedules import cheapest, fastest, plain_gpu_seconds

    step_s = target.plain_s(how.batch)
    told: dict[str, Any] = {
        "plain_step_s": step_s,
        "plain_tokens_per_s": how.batch / step_s,
        "plain_gpu_s_per_million": plain_gpu_seconds(target, how.batch),
        "prefill_s": target.prefill_s(),
        "drafted_token_s": drafter.draft_s(how.batch),
    }
    for schedule in _schedules(drafter):
        quick = fastest(target, drafter, how, schedule)
        cheap = cheapest(target, drafter, how, schedule)
        told[schedule.replace(" ", "_")] = {
            "speedup": quick.speedup,
            "draft_length": quick.draft_length,
            "targets_per_drafter": cheap.targets_per_drafter,
            "cheapest_speedup": cheap.speedup,
            "gpu_s_per_million": cheap.gpu_seconds,
        }
    return told


def _schedules(drafter: Replica) -> tuple[Schedule, ...]:
    """Return the schedules that a drafter can have: none is ahead on the target's own GPUs."""
    return ("sequential", "draft ahead") if drafter.num_gpus else ("sequential",)


def _memory_table(needs: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return a column for each role, which a narrow terminal holds too."""
    table = _table("Memory of a replica, GiB", ("",), tuple(needs))
    table.add_row("GPUs", *(str(need["gpus"]) for need in needs.values()))
    table.add_row("KV each", *(f"{need['kv_each'] / _GIB:.2f}" for need in needs.values()))
    for part in ("weights", "kv_pool", "work", "needed", "usable"):
        row = (f"{need[part] / _GIB:.1f}" for need in needs.values())
        table.add_row(part.replace("kv_pool", "KV pool"), *row)
    table.add_row("fits", *("yes" if need["fits"] else "no" for need in needs.values()))
    table.add_row("sequences that fit", *(str(need["max_sequences"]) for need in needs.values()))
    return table


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
    is_changed = replica.stored is None  # a checkpoint that is published quantized has its bits
    return is_changed and fewer.unpackable is None and fewer.max_sequences >= batch


def show_speed(
    limit: tuple[Replica, Replica],
    likely: tuple[Replica, Replica],
    how: Speculating,
    gpu_hour: float | None,
) -> None:
    """Print speeds and what a million tokens cost, of target and drafter at their limit and likely.

    The last line tells the best speedup that is likely.
    """
    table = _table(f"Speed at acceptance {how.acceptance:g}", ("",), ("limit", "likely"))
    (_, limits), (best, values) = (_speeds(*pair, how, gpu_hour) for pair in (limit, likely))
    for name, value in values.items():
        table.add_row(name, limits[name], value)
    out.print(table)
    note(
        "speedup: over plain decoding, with one drafter for each target, at its best draft length. "
        "cheapest: drafters to targets where a token costs the least, and the speedup there."
    )
    what = f"makes decoding {best:.2f} times as fast as plain"
    if best < 1:
        target, drafter = likely
        is_larger = drafter.shape.num_parameters > target.shape.num_parameters
        buys = " and buys quality" * is_larger
        what = f"costs speed{buys}: at best {best:.2f} of plain decoding"
    say(f"At batch {how.batch} this drafter likely {what}.")


def _speeds(
    target: Replica, drafter: Replica, how: Speculating, gpu_hour: float | None
) -> tuple[float, dict[str, str]]:
    """Return the best speedup of a pair, and the rows of its column by name."""
    told = _describe_speed(target, drafter, how)
    plain = told["plain_gpu_s_per_million"]
    cost = "GPU-s" if gpu_hour is None else "price"
    apart = drafter.num_gpus > 0
    gpus = f"{drafter.num_gpus} GPU{'s' * (drafter.num_gpus > 1)}" if apart else "the target's"
    rows = {
        "plain: ms a step": f"{told['plain_step_s'] * 1e3:.1f}",
        "plain: tokens/s": f"{told['plain_tokens_per_s']:.0f}",
        f"plain: {cost}/1M": _cost(plain, gpu_hour),
        "prefill of one context, s": f"{told['prefill_s']:.1f}",
        "tokens verified in a plain step": str(target.free_rows(how.batch)),
        f"drafted token on {gpus}, ms": f"{told['drafted_token_s'] * 1e3:.1f}",
    }
    best = 0.0
    for schedule in _schedules(drafter):
        of = told[schedule.replace(" ", "_")]
        best, gpu_s = max(best, of["speedup"]), of["gpu_s_per_million"]
        rows[f"{schedule}: speedup"] = f"{of['speedup']:.2f} at {of['draft_length']}"
        if apart:
            ratio = f"1:{of['targets_per_drafter']}"
            rows[f"{schedule}: cheapest"] = f"{ratio} {of['cheapest_speedup']:.2f}"
        rows[f"{schedule}: {cost}/1M, of plain"] = f"{_cost(gpu_s, gpu_hour)} {gpu_s / plain:.2f}"
    return best, rows


def _cost(gpu_seconds: float, gpu_hour: float | None) -> str:
    """Return the cost in money where a price is given, else in GPU-seconds."""
    return f"{gpu_seconds:,.0f}" if gpu_hour is None else f"{gpu_seconds / 3600 * gpu_hour:,.2f}"
