"""The planner's arithmetic, against a table that was worked out apart from it.

H200, Llama-3.1-8B in bfloat16 at 131,072 tokens, its drafters on GPUs of their own with 5,120
tokens each. The table's rounds have the extra position that ours lack (``docs/planning.md``).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from rapid.planning.gpus import GPUS
from rapid.planning.known_models import KNOWN_SHAPES
from rapid.planning.plan import IDEAL, LIKELY, LIMIT, Replica, group_sizes
from rapid.planning.schedules import (
    Operation,
    Speculating,
    cheapest,
    fastest,
    plain_gpu_seconds,
)
from rapid.planning.speedups import compute_speedup, tokens_per_round

H200 = GPUS["h200"]
SHAPES = {name: shape for name, (_, shape) in KNOWN_SHAPES.items()}
TARGET = Replica(SHAPES["llama-3.1-8b"], H200, 131072)
DRAFTER = replace(TARGET, context=5120)
ALL_FP8 = replace(DRAFTER, layer_bits=8, other_bits=8)
SMALL = replace(DRAFTER, shape=SHAPES["llama-3.2-1b"])
LARGE = replace(DRAFTER, shape=SHAPES["llama-3.1-70b"])
TOKENS = 131072


def near(value: float) -> object:
    return pytest.approx(value, rel=0.05)


def speedup(
    batch: int,
    acceptance: float,
    drafter: Replica = DRAFTER,
    hits: float | None = None,
    target: Replica = TARGET,
) -> float:
    """The best, counted as the table counts."""
    if hits is None:
        how = Speculating(batch, acceptance, extra_position=True)
        return fastest(target, drafter, how, "sequential").speedup
    times = {
        "target_s": target.step_s(batch),
        "verify_s": target.step_s(batch),
        "draft_s": drafter.step_s(batch),
    }
    return max(
        compute_speedup(
            tokens_per_round(acceptance, length, extra_position=True), length, hits, **times
        )
        for length in range(1, 65)
    )


class TestRoofline:
    @pytest.mark.parametrize(
        ("gpu", "milliseconds", "tokens_per_second"),
        [("a100-80gb", 15.8, 63), ("h100-sxm", 9.6, 104), ("h200", 6.7, 149)],
    )
    def test_a_step_at_128k(self, gpu, milliseconds, tokens_per_second):
        seconds = replace(TARGET, gpu=GPUS[gpu]).step_s(1)
        assert seconds * 1e3 == near(milliseconds)
        assert 1 / seconds == near(tokens_per_second)

    @pytest.mark.parametrize(
        ("batch", "target_ms", "draft_ms", "cost"),
        [(1, 6.7, 3.3, 0.49), (2, 10.3, 3.4, 0.33), (4, 17.4, 3.7, 0.21), (6, 24.6, 4.0, 0.16)],
    )
    def test_steps_of_a_batch(self, batch, target_ms, draft_ms, cost):
        target_s, draft_s = TARGET.step_s(batch), DRAFTER.step_s(batch)
        assert (target_s * 1e3, draft_s * 1e3) == (near(target_ms), near(draft_ms))
        assert draft_s / target_s == near(cost)

    @pytest.mark.parametrize(
        ("drafter", "batch", "cost"),
        [
            (ALL_FP8, 1, 0.25), (ALL_FP8, 6, 0.10), (SMALL, 1, 0.08), (SMALL, 6, 0.03),
            (replace(LARGE, num_gpus=2), 1, 2.4), (replace(LARGE, num_gpus=4), 1, 1.31),
            (replace(LARGE, num_gpus=4), 6, 0.37), (replace(LARGE, num_gpus=8), 6, 0.22),
        ],
    )  # fmt: skip
    def test_the_cost_of_other_drafters(self, drafter, batch, cost):
        assert drafter.step_s(batch) / TARGET.step_s(batch) == near(cost)

    def test_a_layer_on_several_gpus_is_read_by_all_at_once(self):
        one = replace(LARGE, gpu=GPUS["h100-sxm"])
        four, eight = replace(one, num_gpus=4), replace(one, num_gpus=8)
        sums_s = 162 * 9e-6  # two a layer of 80, the embeddings', the logits
        assert four.step_s(1) == pytest.approx(one.step_s(1) / 4 + sums_s)
        assert eight.step_s(1) == pytest.approx(one.step_s(1) / 8 + sums_s)
        assert eight.prefill_s() == one.prefill_s() / 8
        assert eight.max_sequences > four.max_sequences

    def test_layers_of_other_bits_on_several_gpus_are_read_one_after_the_other(self):
        one = replace(LARGE, layer_bits=5)
        four = replace(one, num_gpus=4)
        assert (four.step_s(1), four.prefill_s()) == (one.step_s(1), one.prefill_s())
        assert four.max_sequences > one.max_sequences

    def test_layers_of_four_bits_are_read_with_their_scales_by_all_gpus_at_once(self):
        one = replace(LARGE, layer_bits=4)
        shape, rest = one.shape, 2 * one.shape.head_weights
        assert one.need(1).weights == near(shape.layer_weights * 4.25 / 8 + 2 * rest)
        assert replace(one, num_gpus=4).prefill_s() == one.prefill_s() / 4
        assert replace(one, num_gpus=4).step_s(1) < one.step_s(1) / 2
        mixed = replace(one, shape=SHAPES["qwen3-30b-a3b"])
        assert replace(mixed, num_gpus=4).prefill_s() == mixed.prefill_s()

    @pytest.mark.parametrize(("batch", "milliseconds"), [(1, 5.2), (6, 5.7)])
    def test_layers_in_fp8_are_read_by_all_gpus_at_once(self, batch, milliseconds):
        four = replace(LARGE, layer_bits=8, num_gpus=4)
        assert four.step_s(batch) * 1e3 == near(milliseconds)

    def test_keys_in_fp8_halve_what_sequences_read(self):
        assert replace(TARGET, kv_bytes=1).step_s(6) * 1e3 == near(13.9)
        slower = replace(TARGET, losses=replace(IDEAL, kv_share=0.5))
        assert slower.step_s(6) - TARGET.step_s(6) == near(6 * 17.2e9 / 4.8e12)

    def test_what_questions_on_one_document_share_is_held_and_read_once(self):
        six = replace(TARGET, shared=TOKENS - 100)
        assert six.step_s(6) * 1e3 == near(6.7)
        assert six.step_s(1) == TARGET.step_s(1)
        assert six.need(6).kv_pool == near(TARGET.need(1).kv_pool)
        assert six.max_sequences > 1000

    def test_the_host_s_time_comes_on_top(self):
        host = {"step_s": 1, "sequence_s": 0.1, "layer_s": 0.01, "layer_sequence_s": 0.001}
        slower = replace(TARGET, losses=replace(IDEAL, **host))
        assert slower.step_s(6) - TARGET.step_s(6) == pytest.approx(1 + 0.6 + 32 * 0.016)
        assert slower.free_rows(6) == TARGET.free_rows(6)

    def test_a_share_of_the_bandwidth_takes_longer_in_proportion(self):
        half = replace(TARGET, losses=replace(IDEAL, weights_share=0.5, kv_share=0.5))
        assert half.step_s(4) == pytest.approx(2 * TARGET.step_s(4))

    def test_verifying_is_free_until_computing_takes_longer_than_reading(self):
        assert (TARGET.free_rows(1), TARGET.free_rows(1000)) == (39, 21)
        assert TARGET.step_s(6, TARGET.free_rows(6)) == TARGET.step_s(6)
        assert TARGET.step_s(6, TARGET.free_rows(6) + 1) > TARGET.step_s(6)

    def test_prefill_and_what_restoring_must_beat(self):
        assert TARGET.shape.prefill_flops(TOKENS) == near(6.6e15)
        assert TARGET.prefill_s() == near(13.4)
        restored = {50: 0.34, 25: 0.69, 6: 2.9, 3: 5.7}  # by GB/s
        assert all(TARGET.kv_per_sequence / speed / 1e9 == near(s) for speed, s in restored.items())
        assert TARGET.kv_per_sequence / TARGET.prefill_s() == near(1.3e9)


class TestSpeedup:
    @pytest.mark.parametrize(
        ("batch", "at_60", "at_77", "at_90"),
        [
            (1, 1.08, 1.20, 1.40),
            (2, 1.20, 1.42, 1.76),
            (4, 1.38, 1.73, 2.30),
            (6, 1.48, 1.93, 2.68),
        ],
    )
    def test_best_sequential(self, batch, at_60, at_77, at_90):
        best = [speedup(batch, acceptance) for acceptance in (0.6, 0.77, 0.9)]
        assert best == near([at_60, at_77, at_90])

    @pytest.mark.parametrize(
        ("batch", "hits", "expected"),
        [(1, 0.5, 1.59), (1, 0.8, 1.98), (1, 1, 2.36), (2, 1, 2.82), (4, 1, 3.17),
         (6, 0.5, 2.46), (6, 0.8, 3.06), (6, 1, 3.65)],
    )  # fmt: skip
    def test_best_overlapped(self, batch, hits, expected):
        assert speedup(batch, 0.77, hits=hits) == near(expected)

    @pytest.mark.parametrize(
        ("drafter", "num_gpus", "batch", "acceptance", "expected"),
        [
            (ALL_FP8, 1, 1, 0.77, 1.60), (ALL_FP8, 1, 6, 0.77, 2.31),
            (SMALL, 1, 1, 0.60, 1.75), (SMALL, 1, 6, 0.60, 2.08),
            (LARGE, 2, 1, 0.77, 0.52), (LARGE, 4, 1, 0.77, 0.77),
            (LARGE, 4, 6, 0.77, 1.35), (LARGE, 8, 6, 0.77, 1.71),
        ],
    )  # fmt: skip
    def test_other_drafters(self, drafter, num_gpus, batch, acceptance, expected):
        assert speedup(batch, acceptance, replace(drafter, num_gpus=num_gpus)) == near(expected)

    def test_a_large_drafter_overlapped(self):
        assert speedup(6, 0.77, replace(LARGE, num_gpus=4), hits=0.8) == near(2.13)

    def test_never_above_the_tokens_of_a_round(self):
        for hits in (0, 0.5, 1):
            assert compute_speedup(
                3.0, 4, hits, target_s=1.0, draft_s=0.01, verify_s=1.0
            ) <= 3.0 + 1e-9  # fmt: skip

    def test_messages_count_once_a_round(self):
        quick = compute_speedup(2.0, 1, 1, target_s=1.0, draft_s=0.5, verify_s=1.0)
        slow = compute_speedup(2.0, 1, 1, target_s=1.0, draft_s=0.5, verify_s=1.0, round_s=1.0)
        assert (quick, slow) == (2.0, 1.0)


class TestOurRounds:
    """Without the extra position, as the engines run them."""

    def test_a_block_of_one_commits_one_token_and_costs_a_draft(self):
        assert tokens_per_round(0.77, 1) == 1
        assert tokens_per_round(0.5, 3) == 1 + 0.5 + 0.25
        assert tokens_per_round(1.0, 4) == 4
        assert tokens_per_round(1.0, 4, extra_position=True) == 5

    def test_drafting_for_itself_at_batch_1_pays_by_the_published_formula_only(self):
        ours = fastest(TARGET, DRAFTER, Speculating(1, 0.77), "sequential")
        theirs = fastest(TARGET, DRAFTER, Speculating(1, 0.77, extra_position=True), "sequential")
        assert ours.speedup == pytest.approx(0.96, abs=0.005)  # as docs/planning.md says
        assert theirs.speedup == pytest.approx(1.20, abs=0.005)

    def test_hits_are_the_blocks_accepted_whole(self):
        ours = fastest(TARGET, DRAFTER, Speculating(6, 0.77), "draft ahead")
        given = Speculating(6, 0.77, hits=0.77**ours.draft_length)
        told = fastest(TARGET, DRAFTER, given, "draft ahead")
        assert told.speedup == pytest.approx(ours.speedup, rel=0.05)
        sequential = fastest(TARGET, DRAFTER, Speculating(6, 0.77), "sequential")
        assert sequential.speedup < ours.speedup < tokens_per_round(0.77, ours.draft_length)

    def test_the_target_s_gpus_are_counted_once_when_it_drafts_itself(self):
        on_it = fastest(TARGET, replace(DRAFTER, num_gpus=0), Speculating(6, 0.77), "sequential")
        apart = fastest(TARGET, DRAFTER, Speculating(6, 0.77), "sequential")
        assert on_it.speedup == apart.speedup
        assert on_it.gpu_seconds == pytest.approx(apart.gpu_seconds / 2)

    def test_a_token_of_plain_decoding_costs_a_step_over_the_batch(self):
        assert plain_gpu_seconds(TARGET, 6) == pytest.approx(TARGET.step_s(6) / 6 * 1e6)
        split = replace(TARGET, num_gpus=2)  # half the time on twice the GPUs, and the sums
        assert plain_gpu_seconds(split, 6) == near(1.05 * plain_gpu_seconds(TARGET, 6))

    def test_the_cheapest_ratio_is_no_dearer_than_its_neighbours(self):
        how = Speculating(6, 0.77)
        best = cheapest(TARGET, SMALL, how, "draft ahead")
        assert best.targets_per_drafter > 1

        def cost(targets: int) -> float:
            return fastest(TARGET, SMALL, how, "draft ahead", targets).gpu_seconds

        n = best.targets_per_drafter
        assert best.gpu_seconds == cost(n) <= min(cost(n - 1), cost(n + 1))

    def test_a_drafter_shares_itself_no_further_than_its_memory(self):
        tight = replace(LARGE, num_gpus=2, context=65536)
        assert tight.max_sequences < 12
        operation = cheapest(TARGET, tight, Speculating(4, 0.9), "draft ahead")
        assert isinstance(operation, Operation)
        assert operation.targets_per_drafter * 4 <= tight.max_sequences


class TestLikely:
    """What engines lose to the limits, against estimates that were worked out line by line."""

    @pytest.mark.parametrize(
        ("replica", "batch", "milliseconds"),
        [
            (TARGET, 1, 9.9), (TARGET, 6, 35.7),
            (replace(LARGE, num_gpus=4), 6, 13.8), (replace(LARGE, layer_bits=4), 1, 20.1),
            (replace(LARGE, num_gpus=4, layer_bits=8), 1, 8.8),
        ],
    )  # fmt: skip
    def test_a_step_with_its_launches_and_sums(self, replica, batch, milliseconds):
        assert replace(replica, losses=LIKELY).step_s(batch) * 1e3 == near(milliseconds)

    def test_what_a_token_costs_beside_the_bytes(self):
        likely = replace(SMALL, losses=LIKELY)
        bytes_s = SMALL.shape.read_bytes() / 0.83 + SMALL.kv_per_sequence / 0.7
        layers_s = 16 * (4 * 2e-6 + 8.5e-6)
        step_s = bytes_s / 4.8e12 + layers_s + 4.9e-4
        assert likely.step_s(1) == pytest.approx(step_s)
        assert likely.plain_s(1) == pytest.approx(step_s + 11 * 4.5e-6 + 3e-5)
        assert likely.draft_s(1) == pytest.approx(step_s + 12 * 4.5e-6 + 1.5e-5)
        assert likely.verify_s(1, 1) == pytest.approx(step_s + 12 * 4.5e-6 + 3e-5)

    def test_a_witness_is_as_many_rows_again_and_its_keys(self):
        target = replace(TARGET, losses=replace(IDEAL, sequence_s=1e-3), witness=5120)
        more_s = 6 * (DRAFTER.kv_per_sequence / 4.8e12 + 1e-3)
        assert target.verify_s(6, 4) - target.step_s(6, 4) == pytest.approx(more_s)
        assert target.plain_s(6) == target.step_s(6)
        twice = target.verify_s(1, 200) / replace(target, witness=0).verify_s(1, 200)
        assert 1.1 < twice < 1.5  # where computing limits: the products twice, the long keys once
        mixed = replace(target, shape=SHAPES["qwen3-30b-a3b"])
        more_s = mixed.step_s(1, 8) - mixed.step_s(1, 4)
        assert mixed.verify_s(1, 4) - mixed.step_s(1, 4) > 0.9 * more_s  # experts of 8 rows

    def test_prefill_by_flash_attention_2(self):
        assert replace(TARGET, losses=LIKELY).prefill_s() == near(17)
        slower = replace(TARGET, gpu=GPUS["a100-80gb"])  # whose peak is too low to be missed
        assert replace(slower, losses=LIKELY).prefill_s() == slower.prefill_s()

    def test_a_round_has_messages_between_machines_once(self):
        target = replace(TARGET, losses=LIKELY)
        drafter = replace(SMALL, losses=LIKELY)
        now = fastest(target, drafter, Speculating(1, 0.77), "sequential")
        silent = replace(target, losses=replace(LIKELY, round_s=0.0))
        quiet = fastest(silent, drafter, Speculating(1, 0.77), "sequential")
        round_s = now.draft_length * drafter.draft_s(1) + target.verify_s(1, now.draft_length)
        assert now.speedup < quiet.speedup
        assert now.speedup == pytest.approx(
            tokens_per_round(0.77, now.draft_length) * target.plain_s(1) / (round_s + 1.2e-3)
        )

    @pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
    def test_nothing_is_likely_to_be_better_than_its_limit(self, shape, gpu):
        limit = Replica(shape, gpu, 8192, num_gpus=4, losses=LIMIT)
        likely = replace(limit, losses=LIKELY, witness=4096)
        for batch in (1, 64):
            assert likely.plain_s(batch) > limit.plain_s(batch)
            assert likely.draft_s(batch) > limit.draft_s(batch)
            assert likely.verify_s(batch, 8) > limit.verify_s(batch, 8)
        assert likely.prefill_s() >= limit.prefill_s()


class TestMemory:
    def test_six_contexts_of_128k_fit_an_h200_and_twelve_with_keys_in_fp8(self):
        assert TARGET.kv_per_sequence == near(17.2e9) == 16 * 2**30
        assert TARGET.max_sequences == 6
        assert replace(TARGET, kv_bytes=1).max_sequences == 12

    def test_need_adds_up(self):
        need = TARGET.need(6)
        assert need.total == need.weights + need.kv_pool + need.work <= TARGET.usable
        assert TARGET.need(7).total > TARGET.usable

    def test_70b_fits_no_single_h200_with_any_keys(self):
        assert LARGE.max_sequences == 0
        assert group_sizes(LARGE, 6) == [2, 4, 8]
        assert group_sizes(replace(LARGE, layer_bits=4), 6) == [1, 2, 4, 8]


def test_no_group_is_planned_whose_parts_cannot_be_packed() -> None:
    in_four = Replica(SHAPES["qwen2.5-72b"], H200, 1024, layer_bits=4)
    assert group_sizes(in_four, 1) == [1, 2]
    assert replace(in_four, num_gpus=4).unpackable == "7392 rows of the MLP"
    assert group_sizes(replace(in_four, layer_bits=8), 1) == [1, 2, 4, 8]
