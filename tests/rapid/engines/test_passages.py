"""Passages that are read apart: what the engine computes is what the slow specification says."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from rapid.engines.engine import Engine
from rapid.engines.kv.passages import NUM_SINKS
from rapid.errors import BadRequest
from rapid.messages import Int32Array, LeaseRequest, PrefillReceipt, TokenLogprobs, Verdict
from tests.rapid.engines.gate import Gate
from tests.rapid.tiny_models import lease_request, random_prompt, reference, tiny_engine

HEAD, QUESTION = random_prompt(21, seed=1), random_prompt(9, seed=2)
PASSAGES = [random_prompt(length, seed=3 + length) for length in (30, 17, 41)]


@pytest.fixture
def engine_settings() -> dict[str, Any]:
    return {"passage_cache_tokens": 256}


def ask(
    order: tuple[int, ...] = (0, 1, 2), question: Int32Array = QUESTION, **settings: Any
) -> LeaseRequest:
    """A request whose prompt has passages in some order."""
    parts = [HEAD, *(PASSAGES[number] for number in order)]
    ends = [*itertools.accumulate(map(len, parts))]
    spans = tuple(itertools.pairwise(ends))
    prompt = np.concatenate([*parts, question])
    return lease_request(prompt=prompt, **({"passages": spans, "num_logprobs": 8} | settings))


async def run(engine: Engine, request: LeaseRequest) -> tuple[PrefillReceipt, Verdict, int]:
    """Return receipts of reading and of one token, and the rows that were computed."""
    before = engine.status().step_tokens
    await engine.open(request)
    receipt = await engine.prefill(request.lease_id)
    verdict = await engine.decode(request.lease_id, 0, 1)
    rows = engine.status().step_tokens - before
    engine.release(request.lease_id)
    engine.check_integrity()
    return receipt, verdict, rows


def keys_of(engine: Engine, layer: int, lease_id: str = "a") -> torch.Tensor:
    """The keys of a lease's prompt but its last token, [kv_heads, tokens, head_dim]."""
    (sequence,) = engine._state.ledger.get(lease_id).sequences
    spans = sequence.table.spans(0, sequence.num_prompt - 1)
    keys, _ = engine._compute.runner.cache.layers[layer]
    return torch.cat([keys[:, start:stop] for start, stop in spans], 1)


@torch.no_grad()
def specify(request: LeaseRequest, family: str) -> torch.Tensor:
    """The log-probabilities behind a prompt, of one masked forward and one over its turned keys."""
    model: Any = reference(family)
    spans, end = request.passages, request.passages[-1][1]
    ids = torch.from_numpy(request.prompt_ids.astype(np.int64))[None]
    positions, by = torch.arange(end), torch.zeros(end, dtype=torch.long)
    sees = torch.ones(end, end, dtype=torch.bool).tril()
    for start, stop in spans:
        positions[start:stop] = torch.arange(NUM_SINKS, NUM_SINKS + stop - start)
        by[start:stop] = start - NUM_SINKS
        sees[start:stop, NUM_SINKS:start] = False
    read = model(
        input_ids=ids[:, :end],
        position_ids=positions[None],
        attention_mask=torch.zeros(1, 1, end, end).masked_fill(~sees, -torch.inf),
        use_cache=True,
    ).past_key_values
    kept = DynamicCache()
    cos, sin = model.model.rotary_emb(torch.zeros(1), by[None])
    for index, layer in enumerate(read.layers):
        turned, _ = apply_rotary_pos_emb(layer.keys, layer.keys, cos, sin)
        kept.update(turned, layer.values, index)
    logits = model(input_ids=ids[:, end:], past_key_values=kept).logits[0, -1]
    told: torch.Tensor = logits[:96].log_softmax(-1)
    return told


def assert_equal(told: TokenLogprobs, expected: torch.Tensor) -> None:
    assert told.token_id == int(expected.argmax())
    assert dict(told.top) == pytest.approx(
        {token: float(expected[token]) for token, _ in told.top}, abs=1e-4
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("settings", [{}, {"step_tokens": 16}, {"deterministic": True}])
async def test_an_answer_is_that_of_the_specification(
    family: str, settings: dict[str, Any]
) -> None:
    engine = tiny_engine(family, passage_cache_tokens=256, **settings)
    first, second = ask(), ask((2, 0, 1))
    for request, num_placed in ((first, 0), (second, 88)):
        receipt, verdict, _ = await run(engine, request)
        assert (receipt.reads_apart, receipt.num_placed_tokens) == (True, num_placed)
        assert_equal(verdict.logprobs[0], specify(request, family))
    engine.close()


async def test_turned_keys_are_those_computed_in_place(engine: Engine) -> None:
    together = tiny_engine()
    for order in ((0, 1, 2), (2, 1, 0)):  # read, then placed
        request = ask(order)
        for each in (engine, together):
            await each.open(request)
            await each.prefill("a")
        # Those of the first layer depend on nothing but token and position.
        torch.testing.assert_close(keys_of(engine, 0), keys_of(together, 0), rtol=0, atol=1e-5)
        assert (keys_of(engine, 1) - keys_of(together, 1)).abs().max() > 1e-2
        for each in (engine, together):
            each.release("a")
    together.close()


@pytest.mark.parametrize("bits", [8, 4])
async def test_in_fewer_bits_the_first_prompt_reads_what_later_ones_do(bits: int) -> None:
    engine = tiny_engine(passage_cache_tokens=256, passage_cache_bits=bits)
    exact = tiny_engine(passage_cache_tokens=256)
    for order in ((0, 1, 2), (2, 1, 0)):  # read, then placed
        request = ask(order)
        for each in (engine, exact):
            await each.open(request)
            await each.prefill("a")
        off = (keys_of(engine, 0) - keys_of(exact, 0)).abs()
        span = keys_of(exact, 0).aminmax()
        assert 0 < off.max() <= 0.51 * (span.max - span.min) / (2**bits - 1)
        for each in (engine, exact):
            each.release("a")
    packed, whole = engine._passages, exact._passages
    assert packed is not None
    assert whole is not None
    assert packed.num_tokens == whole.num_tokens == 88
    # Heads of this model have 8 numbers, so that groups take much beside them.
    assert packed.num_bytes < whole.num_bytes * (bits / 32 + 0.15)
    for each in (engine, exact):
        each.close()


@pytest.mark.parametrize("bits", [8, 4])
async def test_in_fewer_bits_an_answer_does_not_depend_on_who_read_the_passages(bits: int) -> None:
    found = list[dict[int, float]]()
    for others in ([], [ask((2, 1, 0), random_prompt(9, seed=50))]):
        engine = tiny_engine(passage_cache_tokens=256, passage_cache_bits=bits)
        for request in (*others, ask()):
            receipt, verdict, _ = await run(engine, request)
        assert receipt.num_placed_tokens == 88 * len(others)
        found.append(dict(verdict.logprobs[0].top))
        engine.close()
    assert found[0] == pytest.approx(found[1], abs=1e-5)


async def test_only_head_and_question_are_read_anew(engine: Engine) -> None:
    _, _, whole = await run(engine, ask())
    assert whole == len(HEAD) + 88 + len(QUESTION)
    receipt, _, rows = await run(engine, ask((2, 1, 0), random_prompt(9, seed=50)))
    in_pages = len(HEAD) // 8 * 8
    assert receipt.num_cached_tokens == in_pages
    assert rows == len(HEAD) - in_pages + len(QUESTION)
    assert engine.status().passage_tokens_placed == 88


async def test_a_prompt_that_pages_hold_in_part_is_completed(engine: Engine) -> None:
    await run(engine, ask())
    receipt, verdict, rows = await run(engine, ask((0, 2, 1)))
    assert receipt.num_cached_tokens == 48  # into the first passage
    assert rows == len(QUESTION)
    other = tiny_engine(passage_cache_tokens=256)
    _, alone, _ = await run(other, ask((0, 2, 1)))
    assert_equal(verdict.logprobs[0], specify(ask((0, 2, 1)), "llama"))
    assert alone.token_ids == verdict.token_ids
    other.close()


async def test_who_reads_the_same_text_together_shares_no_page(engine: Engine) -> None:
    apart, together = ask(), ask(passages=())
    await run(engine, apart)
    receipt, verdict, _ = await run(engine, together)
    assert (receipt.num_cached_tokens, receipt.reads_apart) == (0, False)
    other = tiny_engine()
    _, expected, _ = await run(other, together)
    assert dict(verdict.logprobs[0].top) == pytest.approx(dict(expected.logprobs[0].top), abs=1e-4)
    other.close()


async def test_another_tenant_finds_nothing(engine: Engine) -> None:
    await run(engine, ask())
    for other in (ask(tenant="other"), ask(cache_salt="pepper")):
        receipt, _, _ = await run(engine, other)
        assert (receipt.num_cached_tokens, receipt.num_placed_tokens) == (0, 0)


async def test_several_answers_share_what_was_placed(engine: Engine) -> None:
    await run(engine, ask())
    await engine.open(ask((1, 2, 0), num_choices=2))
    await engine.prefill("a")
    told = [(await engine.decode("a", choice, 1)).logprobs[0] for choice in (0, 1)]
    engine.release("a")
    for each in told:
        assert_equal(each, specify(ask((1, 2, 0)), "llama"))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0)])
async def test_room_goes_by_use_and_each_tenant_keeps_its_part(order: tuple[int, ...]) -> None:
    engine = tiny_engine(passage_cache_tokens=100)
    await run(engine, ask(order))
    for number in range(3):
        await run(engine, ask((1, 2), tenant="flood", question=random_prompt(9, seed=number)))
    assert engine.status().passage_tokens <= 100
    receipt, _, _ = await run(engine, ask(order, question=random_prompt(7, seed=60)))
    assert receipt.num_placed_tokens or receipt.num_cached_tokens
    engine.check_integrity()
    engine.close()


async def test_a_passage_longer_than_the_room_is_read_every_time() -> None:
    engine = tiny_engine(passage_cache_tokens=8)
    for _ in range(2):
        receipt, verdict, _ = await run(engine, ask((1, 0)))
        assert receipt.num_placed_tokens == 0
        assert_equal(verdict.logprobs[0], specify(ask((1, 0)), "llama"))
    assert engine.status().passage_tokens == 0
    engine.close()


@pytest.mark.parametrize("spans", [((30, 21),), ((21, 40), (39, 50)), ((21, 999),)])
async def test_passages_that_are_no_parts_of_the_prompt_are_refused(
    engine: Engine, spans: tuple[tuple[int, int], ...]
) -> None:
    with pytest.raises(BadRequest, match="in order"):
        await engine.open(ask(passages=spans))


async def test_what_is_forgotten_amid_a_passage_is_read_again() -> None:
    engine = tiny_engine(passage_cache_tokens=256, step_tokens=16)
    passages = engine._passages
    assert passages is not None
    engine._compute.runner.cache.stacks[0].zero_()
    engine._state.ledger.pool.is_dirty[:] = True  # as if others had had all pages before
    await engine.open(ask())
    gate = Gate(engine)
    reading = asyncio.ensure_future(engine.prefill("a"))
    for _ in range(3):  # two of the head, and the first of a passage
        await gate.forward_started()
        gate.let_one_through()
    await gate.forward_started()
    forgetting = asyncio.ensure_future(engine.forget({"another"}))  # overwrites the rest of pages
    await asyncio.sleep(0)
    gate.open()
    await asyncio.gather(reading, forgetting)
    verdict = await engine.decode("a", 0, 1)
    engine.release("a")
    assert_equal(verdict.logprobs[0], specify(ask(), "llama"))
    engine.close()


async def test_a_deleted_document_leaves_no_number_behind(engine: Engine) -> None:
    for stack in engine._compute.runner.cache.stacks:
        stack.zero_()
    passages = engine._passages
    assert passages is not None
    await run(engine, ask(documents=frozenset({"d"})))
    await run(engine, ask((1,), tenant="other", documents=frozenset({"e"})))
    kept = [each for each in passages._kept.values() if "d" in each.documents]
    erasures = {each.place: each for each in await engine.forget({"d"})}
    assert (erasures["passages"].num_found, erasures["passages"].pending) == (3, None)
    assert not any(part.any() for each in kept for block in each.blocks for part in block)
    assert engine.status().passage_tokens == 17
    await engine.forget({"e"})
    assert passages.num_bytes == 0
    assert not any(stack.any() for stack in engine._compute.runner.cache.stacks)


@pytest.mark.parametrize(
    "settings", [{"kv_cache_dtype": "fp8"}, {"passage_cache_tokens": 0}, {"tensor_parallel": 1}]
)
async def test_an_engine_that_cannot_says_so(settings: dict[str, Any]) -> None:
    engine = tiny_engine(**{"passage_cache_tokens": 256, **settings})
    receipt, _, _ = await run(engine, ask())
    assert receipt.reads_apart is ("tensor_parallel" in settings)
    engine.close()
