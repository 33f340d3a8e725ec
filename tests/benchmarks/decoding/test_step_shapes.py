"""The simulated load: the same each time, mixed, and nearly all of its steps have a graph."""

from __future__ import annotations

from benchmarks.decoding.simulated_rounds import Load, Run
from benchmarks.decoding.step_shapes import DRAFTER, TARGET, counted, equal, ours, without_chunks


def test_a_simulated_load_is_the_same_each_time_and_mixed() -> None:
    load = Load(6, TARGET, DRAFTER)
    runs = [Run(load).until(20) for _ in range(2)]
    assert runs[0].target.steps == runs[1].target.steps
    assert runs[0].decoding_s == runs[1].decoding_s
    lengths = {tuple(sorted(rows for rows, _ in step)) for step in runs[0].target.steps}
    assert {len(set(step)) for step in lengths} > {1, 2, 3}
    assert runs[0].drafter.steps


def test_nearly_all_steps_of_a_mixed_load_have_a_graph() -> None:
    run = Run(Load(6, TARGET, DRAFTER)).until(150)
    for engine in (run.target, run.drafter):
        steps = without_chunks(engine.steps)
        assert counted(steps, ours)["replayed"] > 0.95
    assert counted(without_chunks(run.target.steps), equal)["replayed"] < 0.75
