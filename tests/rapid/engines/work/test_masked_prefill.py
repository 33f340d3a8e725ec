"""What tokens are worth with parts of a prompt unseen, against transformers with a 4D mask."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rapid.engines.engine import Engine
from rapid.errors import BadRequest, ConfigurationError
from tests.rapid.engines.gate import PROMPT, Gate, opened
from tests.rapid.tiny_models import (
    FAMILIES,
    lease_request,
    loaded,
    random_prompt,
    reference,
    reference_greedy,
    tiny_engine,
)

MASKS = ((0, 0), (0, 11), (5, 30), (38, 39), (0, 39))


@torch.no_grad()
def masked_scores(told: list[int], mask: tuple[int, int], family: str) -> list[float]:
    """The specification: one forward of the whole text, under a mask of attention."""
    text, first = [*PROMPT.tolist(), *told], len(PROMPT) - 1
    is_seen = torch.ones(len(text), len(text), dtype=torch.bool).tril()
    is_seen[first:, mask[0] : mask[1]] = False
    hidden = torch.zeros(is_seen.shape).masked_fill(~is_seen, float("-inf"))[None, None]
    logits = reference(family)(torch.tensor([text]), attention_mask=hidden, use_cache=False).logits
    rows = logits[0, first:-1, : loaded(family).vocab_size].log_softmax(-1)
    return rows.gather(1, torch.tensor(told)[:, None])[:, 0].tolist()


async def scores(engine: Engine, told: list[int], masks: tuple[tuple[int, int], ...]) -> object:
    committed = (tuple(told),) * len(masks)
    request = lease_request(
        "m", PROMPT, num_choices=len(masks), max_tokens=len(told), masks=masks, committed=committed
    )
    await engine.open(request)
    found = (await engine.prefill("m")).scores
    engine.release("m")
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 40])  # 40 tokens take three steps
async def test_scores_equal_those_of_a_forward_with_a_mask(family: str, length: int) -> None:
    engine, told = tiny_engine(family), random_prompt(length, seed=9).tolist()
    found = await scores(engine, told, MASKS)
    expected = [masked_scores(told, mask, family) for mask in MASKS]
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert len({round(sum(each), 3) for each in expected}) == len(MASKS)
    engine.close()


async def test_all_masks_are_one_forward_over_a_prompt_that_is_kept(engine: Engine) -> None:
    await opened(engine)  # the drafter's lease
    gate = Gate(engine)
    gate.open()
    await scores(engine, random_prompt(10, seed=9).tolist(), MASKS)
    rows = [[len(feed.token_ids) for feed in feeds] for feeds in gate.feeds]
    # Of the prompt's 40 tokens 39 precede the scored rows; four pages of eight are kept.
    assert rows == [[7], [10] * len(MASKS)]
    engine.check_integrity()


async def test_nothing_of_it_is_found_by_a_later_prompt(engine: Engine) -> None:
    told = random_prompt(20, seed=9).tolist()
    await scores(engine, told, MASKS)
    text = [*PROMPT.tolist(), *told]
    await opened(engine, "b", prompt=np.array(text, dtype=np.int32))
    verdict = await engine.decode("b", 0, 4)
    assert list(verdict.token_ids) == reference_greedy(text, 4)


async def test_an_engine_that_computes_in_tiles_refuses() -> None:
    engine = tiny_engine(deterministic=True)
    with pytest.raises(ConfigurationError, match="leaves out no part"):
        await scores(engine, [5, 6], MASKS)
    engine.close()


@pytest.mark.parametrize("masks", [((0, 40),), ((7, 3),), ((0, 0), (0, 1))])
async def test_masks_that_fit_no_choice_or_prompt_are_refused(
    engine: Engine, masks: tuple[tuple[int, int], ...]
) -> None:
    request = replace(lease_request("m", PROMPT), masks=masks, committed=((5,),))
    with pytest.raises(BadRequest, match="mask"):
        await engine.open(request)
