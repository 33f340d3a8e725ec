"""What the tokens of a prompt are worth, against a forward of transformers over the whole of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rapid.engines.engine import Engine
from rapid.messages import Int32Array, PrefillReceipt
from tests.rapid.engines.gate import EXPECTED, PROMPT, Gate, opened
from tests.rapid.tiny_models import (
    FAMILIES,
    lease_request,
    loaded,
    random_prompt,
    reference,
    tiny_engine,
)

PAGE = 8


@torch.no_grad()
def expected(prompt: Int32Array, family: str) -> torch.Tensor:
    """The specification: log-probabilities after each token but the last [tokens - 1, vocab]."""
    logits = reference(family)(torch.tensor([prompt.tolist()]), use_cache=False).logits
    return logits[0, :-1, : loaded(family).vocab_size].log_softmax(-1)


async def scored(
    engine: Engine, prompt: Int32Array = PROMPT, start: int = 1, **settings: object
) -> PrefillReceipt:
    request = lease_request("s", prompt, scored_from=start, **settings)
    await engine.open(request)
    receipt = await engine.prefill("s")
    engine.release("s")
    return receipt


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("start", [1, 2, 17, 39, 40])
async def test_scores_are_those_of_one_forward(family: str, start: int) -> None:
    engine = tiny_engine(family)
    told = (await scored(engine, start=start, num_logprobs=2)).prompt_scores
    assert [each.token_id for each in told] == PROMPT[start:].tolist()
    rows = expected(PROMPT, family)[start - 1 :]
    chosen = rows.gather(1, torch.tensor(PROMPT[start:].tolist())[:, None])[:, 0]
    np.testing.assert_allclose([each.logprob for each in told], chosen, atol=1e-4)
    for each, row in zip(told, rows, strict=True):
        best = row.topk(2)
        assert [token_id for token_id, _ in each.top] == best.indices.tolist()
        np.testing.assert_allclose([worth for _, worth in each.top], best.values, atol=1e-4)
    engine.check_integrity()
    engine.close()


async def test_a_prompt_of_one_token_has_no_scores(engine: Engine) -> None:
    assert (await scored(engine, PROMPT[:1])).prompt_scores == ()


async def test_computed_pages_are_read_again_and_not_written(engine: Engine) -> None:
    await opened(engine)
    cache = engine._compute.runner.cache
    pages = engine._state.ledger.get("a").prompt_pages.tolist()
    assert len(pages) == 4
    before = [each.clone() for page in pages for each in cache.blocks(slice(page, page + 1))]
    gate = Gate(engine)
    gate.open()
    receipt = await scored(engine, start=1)
    assert receipt.num_cached_tokens == 0
    again = gate.feeds[0][0]
    assert (again.position, len(again.token_ids)) == (0, 32)
    assert again.scratch is not None
    after = [each for page in pages for each in cache.blocks(slice(page, page + 1))]
    assert all(map(torch.equal, before, after))
    engine.check_integrity()


@pytest.mark.parametrize("start", [24, 25, 33])
async def test_only_what_is_wanted_of_a_computed_prompt_is_read_again(
    engine: Engine, start: int
) -> None:
    await opened(engine)
    gate = Gate(engine)
    gate.open()
    receipt = await scored(engine, start=start)
    known = (start - 1) // PAGE * PAGE
    assert receipt.num_cached_tokens == known
    assert sum(len(feed.token_ids) for feeds in gate.feeds for feed in feeds) == 39 - known
    chosen = expected(PROMPT, "llama")[start - 1 :].gather(
        1, torch.tensor(PROMPT[start:].tolist())[:, None]
    )
    told = [each.logprob for each in receipt.prompt_scores]
    np.testing.assert_allclose(told, chosen[:, 0], atol=1e-4)


async def test_an_answer_goes_on_from_a_prompt_that_was_scored(engine: Engine) -> None:
    await opened(engine, scored_from=1, num_choices=2)
    for choice in range(2):
        assert list((await engine.decode("a", choice, 6)).token_ids) == EXPECTED
    await opened(engine, "b")  # finds the pages
    assert list((await engine.decode("b", 0, 6)).token_ids) == EXPECTED
    engine.check_integrity()


async def test_four_options_are_one_read_of_their_context() -> None:
    engine, context = tiny_engine(), random_prompt(200, seed=4).tolist()
    gate = Gate(engine)
    gate.open()
    options = [[*context, *random_prompt(5, seed=seed).tolist()] for seed in range(10, 14)]
    for index, option in enumerate(options):
        start = len(context) if index else 1
        receipt = await scored(engine, np.array(option, dtype=np.int32), start)
        assert len(receipt.prompt_scores) == len(option) - start
    num_computed = sum(len(feed.token_ids) for feeds in gate.feeds for feed in feeds)
    assert num_computed == 204 + 3 * (204 - 192)  # of each other option, the last page of context
    engine.close()
