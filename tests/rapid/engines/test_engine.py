"""The engine against plain transformers forwards, in float32 on tiny random models."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch

from rapid.config import SpeculationConfig
from rapid.engines.attention.batch import Feed
from rapid.engines.engine import Engine
from rapid.engines.forward.runner import Runner
from rapid.engines.local_ports import EngineDrafter, EngineVerifier, LocalLease
from rapid.errors import (
    BadRequest,
    DrafterUnavailable,
    EngineFailed,
    LeaseNotFound,
    OutOfStep,
)
from rapid.messages import DraftBlock, Verdict
from rapid.speculation.draw import Draw
from rapid.speculation.loop import speculate
from rapid.speculation.sampling import proposal
from tests.rapid.engines import gate as gates
from tests.rapid.engines.gate import Gate
from tests.rapid.tiny_models import (
    EOS,
    FAMILIES,
    VOCAB,
    lease_request,
    loaded,
    random_prompt,
    reference_greedy,
    reference_logits,
    tiny_engine,
)

PROMPT = random_prompt(37, seed=1)
opened = partial(gates.opened, prompt=PROMPT)


def block_of(token_ids: list[int], position: int, choice: int = 0) -> DraftBlock:
    """A sure proposal of these very tokens."""
    ids = np.asarray(token_ids, dtype=np.int32)
    return DraftBlock("a", choice, position, ids, ids[:, None], np.ones((len(ids), 1), np.float32))


async def answer(engine: Engine, lease_id: str, num_tokens: int, choice: int = 0) -> list[int]:
    """Plain decoding in calls of three."""
    token_ids: list[int] = []
    while len(token_ids) < num_tokens:
        verdict = await engine.decode(lease_id, choice, min(3, num_tokens - len(token_ids)))
        token_ids += verdict.token_ids
        if verdict.is_finished:
            break
    return token_ids


@pytest.mark.parametrize("family", FAMILIES)
async def test_prefill_and_greedy_decode_equal_the_reference(family: str) -> None:
    engine = tiny_engine(family, step_tokens=16)  # the prompt takes several chunks
    receipt_lease = await opened(engine)
    assert await answer(engine, receipt_lease, 12) == reference_greedy(PROMPT.tolist(), 12, family)
    engine.release("a")
    engine.check_integrity()
    assert engine.status().kv_pages_in_use == 0
    engine.close()


@pytest.mark.parametrize("family", FAMILIES)
async def test_scored_logits_equal_the_reference(family: str) -> None:
    engine = tiny_engine(family)
    await opened(engine)
    drafted = random_prompt(7, seed=5).tolist()
    scored = await engine.score("a", 0, block_of(drafted, 0))
    expected = reference_logits([*PROMPT.tolist(), *drafted[:-1]], family)[-7:]
    np.testing.assert_allclose(scored.logits, expected, atol=2e-5)
    assert VOCAB <= scored.logits.shape[1] < VOCAB + 8  # the padding is cut
    engine.close()


async def test_rejection_rolls_back_and_the_answer_goes_on_as_if_nothing_was_drafted(
    engine: Engine,
) -> None:
    expected = reference_greedy(PROMPT.tolist(), 16)
    await opened(engine)
    got: list[int] = []
    wrong_at = [0, 2, 4, 1, 3]
    for wrong in wrong_at:
        drafted = expected[len(got) : len(got) + 5]
        if not drafted:
            break
        wrong = min(wrong, len(drafted) - 1)
        drafted[wrong] = 5 if drafted[wrong] != 5 else 6
        verdict = await engine.verify("a", 0, block_of(drafted, len(got)))
        assert verdict.num_accepted == wrong
        assert len(verdict.token_ids) == wrong + 1
        got += verdict.token_ids
    assert got == expected[: len(got)]
    assert len(got) == 15


async def test_a_fully_accepted_block_leaves_its_last_token_to_be_consumed_next(
    engine: Engine,
) -> None:
    expected = reference_greedy(PROMPT.tolist(), 12)
    await opened(engine)
    first = await engine.verify("a", 0, block_of(expected[:5], 0))
    assert (first.token_ids, first.num_accepted) == (tuple(expected[:5]), 5)
    second = await engine.verify("a", 0, block_of(expected[5:10], 5))
    assert second.num_accepted == 5
    assert (await engine.decode("a", 0, 2)).token_ids == tuple(expected[10:12])


async def test_drafts_are_drawn_from_the_softmax_of_the_reference(engine: Engine) -> None:
    speculation = SpeculationConfig(draft_top_k=10)
    request = lease_request("a", PROMPT, temperature=0.8, speculation=speculation)
    await engine.open(request)
    await engine.prefill("a")
    block = await engine.draft("a", 0, None, 6)
    logits = reference_logits([*PROMPT.tolist(), *block.token_ids.tolist()])
    for row in range(6):
        draw = Draw(request.terms.sampling, speculation, 0, row)
        ids, probs = proposal(logits[len(PROMPT) - 1 + row], draw)
        assert block.candidate_ids[row].tolist() == ids.tolist()
        np.testing.assert_allclose(block.candidate_probs[row], probs, atol=1e-5)
        assert block.token_ids[row] in ids
    assert block.position == 0
    assert block.draft_ms > 0


async def test_a_drafter_follows_verdicts_and_keeps_what_was_right(engine: Engine) -> None:
    greedy = reference_greedy(PROMPT.tolist(), 4)
    await opened(engine)
    first = await engine.draft("a", 0, None, 4)
    assert first.token_ids.tolist() == greedy
    corrected = 9 if greedy[2] != 9 else 10
    verdict = Verdict("t", 0, 0, (greedy[0], greedy[1], corrected), 4, 2, False)
    second = await engine.draft("a", 0, verdict, 3)
    prefix = [*PROMPT.tolist(), *verdict.token_ids]
    assert second.position == 3
    assert second.token_ids.tolist() == reference_greedy(prefix, 3)


async def test_a_block_ends_with_its_end_of_sequence_token() -> None:
    prompt = PROMPT.tolist()
    eos = reference_greedy(prompt, 3)[2]
    engine = tiny_engine(eos=eos)
    await opened(engine)
    block = await engine.draft("a", 0, None, 10)
    assert block.token_ids.tolist() == reference_greedy(prompt, 3)
    verdict = await engine.verify("a", 0, block)
    assert verdict.is_finished
    engine.close()


async def test_choices_share_the_prompt_and_answer_apart(engine: Engine) -> None:
    await opened(engine, num_choices=3, temperature=1.0)
    await opened(engine, "alone", temperature=1.0)
    answers = [await answer(engine, "a", 9, choice) for choice in range(3)]
    assert answers[0] == await answer(engine, "alone", 9)
    assert len({tuple(one) for one in answers}) == 3
    greedy = [
        (
            await engine.score("a", choice, block_of([5, 6], len(answers[choice]), choice=choice))
        ).logits[0]
        for choice in range(3)
    ]
    for logits, tokens in zip(greedy, answers, strict=True):
        expected = reference_logits([*PROMPT.tolist(), *tokens])[-1]
        np.testing.assert_allclose(logits, expected, atol=2e-5)


async def test_choices_together_hold_the_prompt_once(engine: Engine) -> None:
    await opened(engine, num_choices=4, max_tokens=8)
    pages_each = -(-(len(PROMPT) + 8 + 10) // 8)
    shared = (len(PROMPT) - 1) // 8
    assert engine.status().kv_pages_in_use == shared + 4 * (pages_each - shared)


@pytest.mark.parametrize("speculative", [False, True])
async def test_concurrent_sequences_give_what_each_gives_alone(
    engine: Engine, speculative: bool
) -> None:
    prompts = {f"s{i}": random_prompt(length, seed=i) for i, length in enumerate((3, 60, 17, 101))}

    async def run(lease_id: str) -> list[int]:
        await opened(engine, lease_id, prompt=prompts[lease_id])
        if not speculative:
            return await answer(engine, lease_id, 10)
        await opened(engine, f"{lease_id}/drafter", prompt=prompts[lease_id][-3:])
        drafter = EngineDrafter(engine, f"{lease_id}/drafter")
        verifier = EngineVerifier(engine, lease_id)
        rounds = speculate(drafter, verifier, max_tokens=10, max_draft=4)
        return [token async for verdict in rounds for token in verdict.token_ids]

    answers = await asyncio.gather(*map(run, prompts))
    for lease_id, tokens in zip(prompts, answers, strict=True):
        assert tokens == reference_greedy(prompts[lease_id].tolist(), 10)


async def test_mixed_draft_lengths_in_one_batch_are_what_each_is_alone() -> None:
    """Drafts of 1 to 9 tokens and verdicts on 0 to 9 of them, in shared forwards and apart."""
    lengths = {"a": 1, "b": 9, "c": 4, "d": 0}
    prompts = {key: random_prompt(20 + 9 * place, seed=place) for place, key in enumerate(lengths)}
    speculation = SpeculationConfig(eta=5.0, coupling="shared_noise")

    async def run(engine: Engine, key: str) -> tuple[list[DraftBlock], list[Verdict]]:
        blocks, verdicts = [], []
        for _ in range(3):
            block = block_of([], sum(len(verdict.token_ids) for verdict in verdicts))
            if lengths[key]:
                block = await engine.draft(key, 0, None, lengths[key])
            blocks.append(block)
            verdicts.append(await engine.verify(key, 0, block))
        return blocks, verdicts

    async def ready(keys: Iterable[str]) -> Engine:
        engine = tiny_engine()
        for key in keys:
            settings = {"temperature": 1.0, "speculation": speculation}
            await opened(engine, key, prompt=prompts[key], **settings)
        return engine

    together = await ready(lengths)
    gate = Gate(together)
    running = [asyncio.ensure_future(run(together, key)) for key in lengths]
    await gate.forward_started()
    await asyncio.sleep(0)
    gate.open()
    mixed = dict(zip(lengths, await asyncio.gather(*running), strict=True))
    assert max(len({len(feed.token_ids) for feed in feeds}) for feeds in gate.feeds) > 1
    together.close()
    for key in lengths:
        engine = await ready([key])
        blocks, verdicts = await run(engine, key)
        assert [v.token_ids for v in mixed[key][1]] == [v.token_ids for v in verdicts]
        for one, other in zip(mixed[key][0], blocks, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert one.candidate_ids.tolist() == other.candidate_ids.tolist()
            np.testing.assert_allclose(one.candidate_probs, other.candidate_probs, atol=1e-5)
        engine.close()


@pytest.mark.parametrize("max_draft", [1, 4, 9])
async def test_seeded_lossless_equals_plain(engine: Engine, max_draft: int) -> None:
    speculation = SpeculationConfig(eta=0.0, coupling="shared_noise", max_draft=max_draft)
    settings = {"temperature": 1.0, "speculation": speculation}
    await opened(engine, "plain", **settings)
    plain = await answer(engine, "plain", 20)
    await opened(engine, "target", **settings)
    await opened(engine, "drafter", prompt=PROMPT[-9:], **settings)
    rounds = speculate(
        EngineDrafter(engine, "drafter"),
        EngineVerifier(engine, "target"),
        max_tokens=20,
        max_draft=max_draft,
    )
    assert [token async for verdict in rounds for token in verdict.token_ids] == plain


class Unsteady:
    """A pace that rests, drafts a little, drafts much, rests again."""

    def __init__(self) -> None:
        self._lengths = itertools.cycle([0, 2, 0, 0, 5, 4, 1])

    def next_length(self, limit: int) -> int:
        return min(limit, next(self._lengths))

    def observe(self, verdict: Verdict) -> None:
        pass


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_drafter_that_rested_catches_up(engine: Engine, temperature: float) -> None:
    speculation = SpeculationConfig(eta=0.0, coupling="shared_noise", max_draft=5)
    settings = {"temperature": temperature, "speculation": speculation, "max_tokens": 60}
    await opened(engine, "plain", **settings)
    plain = await answer(engine, "plain", 60)
    await opened(engine, "target", **settings)
    await opened(engine, "drafter", **settings)  # reads the same: all that it drafts is right
    rounds = speculate(
        EngineDrafter(engine, "drafter"),
        EngineVerifier(engine, "target"),
        max_tokens=60,
        max_draft=5,
        pace=Unsteady(),
    )
    verdicts = [verdict async for verdict in rounds]
    assert [token for verdict in verdicts for token in verdict.token_ids] == plain
    assert {verdict.num_drafted > 0 for verdict in verdicts} == {True, False}
    assert all(verdict.num_accepted == verdict.num_drafted for verdict in verdicts)


async def test_two_engines_share_one_loaded_model() -> None:
    target, drafter = tiny_engine(), tiny_engine()
    await asyncio.gather(opened(target), opened(drafter))
    block = await drafter.draft("a", 0, None, 6)
    verdict = await target.verify("a", 0, block)
    assert verdict.num_accepted == len(block)  # self-speculation on the same context
    target.close()
    drafter.close()


async def test_committed_tokens_are_replayed_into_a_new_lease(engine: Engine) -> None:
    expected = reference_greedy(PROMPT.tolist(), 10)
    await engine.open(
        lease_request("a", PROMPT, num_choices=2, committed=(tuple(expected[:6]), (EOS, 8)))
    )
    await engine.prefill("a")
    verdict = await engine.decode("a", 0, 4)
    assert (verdict.position, verdict.token_ids) == (6, tuple(expected[6:10]))
    assert (await engine.decode("a", 1, 1)).position == 2


@pytest.mark.parametrize("is_witnessed", [False, True])
async def test_an_adaptive_answer_goes_on_in_another_lease_as_if_it_had_stayed(
    engine: Engine, is_witnessed: bool
) -> None:
    common = {
        "temperature": 1.0,
        "max_tokens": 24,
        "speculation": SpeculationConfig(transfer="adaptive", eta=8, coupling="shared_noise"),
    }

    async def verdicts(name: str, committed=(), log_odds: float = 0.0) -> list[Verdict]:
        """Answer from one context, drafted from another; the lease continues `committed`."""
        settings = common | {"committed": (committed,), "log_odds": (log_odds,)}
        await opened(engine, f"{name} target", **settings)
        await opened(engine, f"{name} drafter", **settings, prompt=random_prompt(9, seed=4))
        witness = LocalLease(engine, f"{name} witness") if is_witnessed else None
        if witness is not None:
            await opened(engine, witness.lease_id, **settings, prompt=random_prompt(9, seed=5))
        rounds = speculate(
            EngineDrafter(engine, f"{name} drafter"),
            EngineVerifier(engine, f"{name} target", witness=lambda: witness),
            max_tokens=24 - len(committed),
            max_draft=4,
        )
        return [verdict async for verdict in rounds]

    whole = await verdicts("whole")
    half = len(whole) // 2
    committed = tuple(token for verdict in whole[:half] for token in verdict.token_ids)
    rest = await verdicts("rest", committed, whole[half - 1].log_odds)
    assert [v.token_ids for v in rest] == [v.token_ids for v in whole[half:]]
    log_odds = [verdict.log_odds for verdict in rest]
    assert log_odds == pytest.approx([verdict.log_odds for verdict in whole[half:]], abs=1e-3)
    assert len(set(log_odds)) == len(log_odds)


async def test_judging_elsewhere_commits_the_same(engine: Engine) -> None:
    expected = reference_greedy(PROMPT.tolist(), 8)
    await opened(engine)
    block = block_of([*expected[:3], 50], 0)
    scored = await engine.score("a", 0, block)
    again = await engine.score("a", 0, block)  # nothing was committed
    np.testing.assert_allclose(scored.logits, again.logits, atol=1e-5)
    await engine.commit("a", Verdict("a", 0, 0, tuple(expected[:4]), 4, 3, False))
    assert (await engine.decode("a", 0, 4)).token_ids == tuple(expected[4:8])


async def test_logprobs_are_those_of_the_reference(engine: Engine) -> None:
    await opened(engine, num_logprobs=2)
    verdict = await engine.decode("a", 0, 2)
    expected = torch.log_softmax(reference_logits(PROMPT.tolist())[-1], -1)
    first = verdict.logprobs[0]
    assert first.token_id == verdict.token_ids[0] == first.top[0][0]
    assert first.logprob == pytest.approx(float(expected.max()), abs=1e-5)


async def test_messages_out_of_step_change_nothing(engine: Engine) -> None:
    expected = reference_greedy(PROMPT.tolist(), 4)
    await engine.open(lease_request("a", PROMPT))
    with pytest.raises(OutOfStep, match="not prefilled"):
        await engine.decode("a", 0, 1)
    await engine.prefill("a")
    for call in (
        engine.verify("a", 0, block_of(expected, 3)),
        engine.verify("a", 1, block_of(expected, 0)),
        engine.draft("a", 0, Verdict("a", 0, 2, (5,), 1, 1, False), 2),
        engine.commit("a", Verdict("a", 0, 1, (5,), 1, 1, False)),
        engine.decode("a", 0, 0),
    ):
        with pytest.raises(OutOfStep):
            await call
    assert (await engine.decode("a", 0, 4)).token_ids == tuple(expected)


async def rounds_of_two_leases(
    engine: Engine, on_loss: Callable[[Exception], None]
) -> AsyncIterator[Verdict]:
    """Return rounds whose drafter has the lease b and whose target has the lease a."""
    await opened(engine)
    await opened(engine, "b")
    return speculate(
        EngineDrafter(engine, "b"),
        EngineVerifier(engine, "a"),
        max_tokens=12,
        max_draft=4,
        on_loss=on_loss,
    )


async def test_a_drafter_out_of_step_is_a_bug_and_no_lost_drafter(engine: Engine) -> None:
    """Somebody else moves the drafter's sequence on, so that the next verdict does not fit it."""
    lost: list[Exception] = []
    rounds = await rounds_of_two_leases(engine, on_loss=lost.append)
    await anext(rounds)
    await engine.decode("b", 0, 1)
    with pytest.raises(OutOfStep, match="verdict of choice 0 for position 0"):
        await anext(rounds)
    assert lost == []


async def test_a_drafters_lease_that_is_gone_is_a_lost_drafter(engine: Engine) -> None:
    lost: list[Exception] = []
    rounds = await rounds_of_two_leases(engine, on_loss=lost.append)
    token_ids = [*(await anext(rounds)).token_ids]
    engine.release("b")
    token_ids += [token async for verdict in rounds for token in verdict.token_ids]
    assert token_ids == reference_greedy(PROMPT.tolist(), 12)
    assert [type(error) for error in lost] == [DrafterUnavailable]


@pytest.mark.parametrize("token_id", [-2, VOCAB, VOCAB + 8, 2**31 - 1])
@pytest.mark.parametrize("call", ["verify", "score"])
async def test_a_block_that_proposes_what_is_no_token_is_refused(
    engine: Engine, call: str, token_id: int
) -> None:
    await opened(engine)
    expected = reference_greedy(PROMPT.tolist(), 4)
    ids = np.asarray(expected[:2], np.int32)
    candidates = np.asarray([[expected[0], -1], [expected[1], token_id]], np.int32)
    probs = np.asarray([[1, 0], [0.9, 0.1]], np.float32)
    with pytest.raises(BadRequest, match="proposes a token id beyond the vocabulary"):
        await getattr(engine, call)("a", 0, DraftBlock("a", 0, 0, ids, candidates, probs))
    candidates[1, 1] = VOCAB - 1
    await getattr(engine, call)("a", 0, DraftBlock("a", 0, 0, ids, candidates, probs))
    assert engine.status().leases_open == 1


@pytest.mark.parametrize("shape", [(2, 0), (1, 2)])
async def test_a_block_without_a_proposal_for_each_token_is_refused(
    engine: Engine, shape: tuple[int, int]
) -> None:
    await opened(engine)
    ids, candidates = np.asarray([5, 6], np.int32), np.full(shape, 5, np.int32)
    block = DraftBlock("a", 0, 0, ids, candidates, np.ones(shape, np.float32))
    with pytest.raises(BadRequest, match="a proposal for each of its tokens"):
        await engine.verify("a", 0, block)
    assert engine.status().leases_open == 1


@contextmanager
def one_logit(value: float) -> Iterator[None]:
    """Let the model of all tiny engines give token 7 this logit."""

    def change(_: object, __: object, logits: torch.Tensor) -> torch.Tensor:
        changed = logits.clone()
        changed[..., 7] = value
        return changed

    model = loaded("llama", 0, EOS).model  # cached under these arguments by `tiny_engine`
    hook = model.get_submodule("lm_head").register_forward_hook(change)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("call", ["draft", "decode", "verify"])
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "num_logprobs": 2},
        {"temperature": 0.0, "speculation": SpeculationConfig(eta=10.0)},
        {"temperature": 1.0, "speculation": SpeculationConfig(eta=10.0, coupling="maximal")},
        {"temperature": 1.0, "speculation": SpeculationConfig(eta=0.0, coupling="shared_noise")},
        {"temperature": 1.0, "speculation": SpeculationConfig(eta=0.0, draft_top_k=None)},
        {"temperature": 1.0, "speculation": SpeculationConfig(rule="paper", eta=5.0)},
    ],
)
async def test_logits_that_are_not_numbers_end_the_lease_and_give_no_token(
    engine: Engine,
    settings: dict[str, object],
    call: str,
    value: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await opened(engine, "a", **settings)
    await opened(engine, "b")
    arguments = {"draft": (None, 3), "decode": (3,), "verify": (block_of([5, 6], 0),)}
    with one_logit(value), pytest.raises(EngineFailed, match="its log says why"):
        await getattr(engine, call)("a", 0, *arguments[call])
    assert "logits are not numbers" in caplog.text
    with pytest.raises(LeaseNotFound):
        engine.renew("a")
    assert (await engine.decode("b", 0, 4)).token_ids == tuple(reference_greedy(PROMPT.tolist(), 4))


async def test_a_token_that_logits_rule_out_is_no_failure(engine: Engine) -> None:
    await opened(engine)
    with one_logit(-float("inf")):
        block = await engine.draft("a", 0, None, 3)
        assert (await engine.verify("a", 0, block)).num_accepted == 3


async def test_decoding_ends_at_max_tokens(engine: Engine) -> None:
    await opened(engine, max_tokens=5)
    assert len((await engine.decode("a", 0, 64)).token_ids) == 5
    with pytest.raises(OutOfStep, match="no token left"):
        await engine.decode("a", 0, 1)


async def test_an_engine_keeps_its_threads_beside_another(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    run = Runner.run

    def watched(runner: Runner, feeds: list[Feed]) -> list[torch.Tensor]:
        counts.append(torch.get_num_threads())
        return run(runner, feeds)

    monkeypatch.setattr(Runner, "run", watched)
    first, second = tiny_engine(threads=2), tiny_engine(threads=1)
    for engine in (second, first):
        await opened(engine)
        engine.close()
    assert counts == [1, 2]


@pytest.mark.parametrize("call", ["draft", "verify", "decode"])
async def test_what_was_committed_elsewhere_is_caught_up_in_chunks(call: str) -> None:
    """As after rounds without drafts: many tokens that only the other model has read."""
    engine = tiny_engine(step_tokens=32)
    await opened(engine, max_tokens=120)
    elsewhere = tuple(random_prompt(80, seed=3).tolist())
    run, rows = engine._compute.runner.run, list[int]()

    def counted(feeds: Sequence[Feed]) -> list[torch.Tensor]:
        rows.append(sum(len(feed.token_ids) for feed in feeds))
        return run(feeds)

    engine._compute.runner.run = counted  # type: ignore[method-assign]
    await engine.commit("a", Verdict("a", 0, 0, elsewhere, 0, 0, False))
    expected = reference_greedy([*PROMPT.tolist(), *elsewhere], 4)
    if call == "draft":
        token_ids = (await engine.draft("a", 0, None, 4)).token_ids.tolist()
    elif call == "verify":
        token_ids = list((await engine.verify("a", 0, block_of(expected, 80))).token_ids)
    else:
        token_ids = list((await engine.decode("a", 0, 4)).token_ids)
    assert token_ids == expected
    assert max(rows) <= 32
    engine.release("a")
    engine.check_integrity()
    engine.close()
