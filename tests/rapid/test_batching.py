"""Feeds side by side: positions, slots, and which rows reach the LM head."""

from __future__ import annotations

import torch

from rapid.engines.batching import Feed, Runner, assemble
from rapid.engines.kv_cache import KVCache, PageTable, Run
from tests.rapid.tiny_models import loaded, random_prompt, reference_logits

CPU = torch.device("cpu")


def cache_of(num_pages: int = 32) -> KVCache:
    return KVCache(loaded().kv_layout, num_pages, page_tokens=4)


def test_rows_keep_their_own_positions_and_slots() -> None:
    feeds = [
        Feed([7, 8, 9], 0, PageTable([Run(5, 6)], 4), num_wanted=0),
        Feed([4], 6, PageTable([Run(1, 2), Run(8, 9)], 4), num_wanted=1),
        Feed([5, 6, 7], 3, PageTable([Run(2, 4)], 4), num_wanted=2),
    ]
    batch = assemble(feeds, cache_of(), CPU)
    assert batch.input_ids.tolist() == [[7, 8, 9, 4, 5, 6, 7]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 6, 3, 4, 5]]
    assert batch.wanted.tolist() == [3, 5, 6]
    assert batch.rows.slots.tolist() == [20, 21, 22, 34, 11, 12, 13]
    assert batch.rows.segments[1].past == [(4, 8), (32, 34)]
    assert batch.rows.segments[1].all_spans == [(4, 8), (32, 35)]


def test_only_wanted_rows_reach_the_lm_head() -> None:
    rows_seen: list[int] = []
    model = loaded().model
    hook = model.lm_head.register_forward_pre_hook(
        lambda _, args: rows_seen.append(args[0].shape[1])
    )
    runner = Runner(model, cache_of(), CPU, loaded().vocab_size)
    prompt = random_prompt(30).tolist()
    logits = runner.run(
        [
            Feed(prompt, 0, PageTable([Run(0, 8)], 4), num_wanted=0),
            Feed(prompt[:9], 0, PageTable([Run(8, 11)], 4), num_wanted=3),
        ]
    )
    hook.remove()
    assert rows_seen == [3]
    assert [len(rows) for rows in logits] == [0, 3]
    torch.testing.assert_close(logits[1], reference_logits(prompt[:9])[-3:], atol=2e-5, rtol=0)


def test_logits_are_cut_to_the_shared_vocabulary() -> None:
    runner = Runner(loaded().model, cache_of(), CPU, vocab_size=50)
    (logits,) = runner.run([Feed([5, 6], 0, PageTable([Run(0, 1)], 4), num_wanted=2)])
    assert logits.shape == (2, 50)
    assert logits.dtype == torch.float32
