"""A step's tokens: those of the specification, one by one and together, whatever is asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid.config import Coupling, SamplingConfig, SpeculationConfig
from rapid.errors import EngineFailed
from rapid.messages import DraftBlock
from rapid.planning import shapes
from rapid.speculation.acceptance import Judgement, decode_token, propose
from rapid.speculation.draw import Draw
from rapid.speculation.fast import contenders, step, together
from rapid.speculation.fast.contenders import best_logit, draw_token
from rapid.speculation.fast.judging import is_within_reach
from rapid.speculation.fast.rows import FINE, MANY, Fused, Row
from rapid.speculation.fast.step import answer_questions, answer_together, judge_block
from rapid.speculation.questions import (
    Answer,
    Decoded,
    Proposed,
    Question,
    ToDecode,
    ToJudge,
    ToPropose,
)
from rapid.speculation.sampling import proposal
from rapid.transfers import Transfer
from tests.rapid.speculation.drafted import ROWS, blocks, drafted

WAYS = {"one by one": answer_questions, "together": answer_together}


@pytest.fixture(autouse=True, scope="module")
def vocabularies_count_as_long() -> Iterator[None]:
    """A CPU leaves short ones to the specification, as it takes no longer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rapid.speculation.fast.step._LONG", 0)
        patch.setattr("rapid.speculation.fast.contenders._SPARSE", 0)
        yield


SAMPLINGS = st.builds(
    SamplingConfig,
    temperature=st.sampled_from([0, 1, 1, 0.7, 2, 0.05, 1e-4]),
    top_k=st.sampled_from([None, None, None, 1, 2, 50]),
    top_p=st.sampled_from([1, 1, 1, 0.9, 0.5, 0.1]),
    min_p=st.sampled_from([0, 0, 0, 0.1, 1]),
    seed=st.integers(-(2**63), 2**63 - 1),
)
SPECULATIONS = st.builds(
    SpeculationConfig,
    transfer=st.sampled_from(get_args(Transfer)),
    eta=st.sampled_from([0, 0.5, 1, 10, 10, 50, 250, 1000]),
    coupling=st.sampled_from(get_args(Coupling)),
    plausibility=st.sampled_from([0.1, 0.1, 0, 0.5, 1]),
    draft_top_k=st.sampled_from([1, 3, 64, 64, None]),
    transfer_temperature=st.sampled_from([1, 0.7]),
)


def specified(question: Question) -> Answer | type[Exception]:
    """Answer as the row-by-row code does."""
    try:
        if isinstance(question, ToJudge):
            return question.by_specification()
        if isinstance(question, ToDecode):
            return Decoded(*decode_token(question.logits, question.draw, question.num_logprobs))
        ids, probs = proposal(question.logits, question.draw)
        return Proposed(propose(ids, probs, question.draw), ids, probs)
    except EngineFailed as error:
        return type(error)


def told(answer: Answer | Exception | type[Exception]) -> Any:
    """Return an answer as what can be compared; arrays as all their bytes, odds to 1e-9."""
    if isinstance(answer, Judgement):
        return replace(answer, log_odds=pytest.approx(answer.log_odds, rel=1e-9, abs=1e-9))
    if isinstance(answer, Proposed):
        return answer.token, answer.candidate_ids.tobytes(), answer.candidate_probs.tobytes()
    return type(answer) if isinstance(answer, Exception) else answer


def assert_specified(questions: Sequence[Question], ways: Iterable[str] = WAYS) -> None:
    expected = [told(specified(question)) for question in questions]
    for way in ways:
        assert [told(one) for one in WAYS[way](questions)] == expected


@pytest.mark.parametrize("vocab", [2, 3, 20])
@pytest.mark.parametrize("coupling", get_args(Coupling))
def test_a_vocabulary_of_few_tokens_is_judged_at_the_strongest_move(vocab, coupling):
    """Where 64 times the mean probability is more than one."""
    numbers = np.random.default_rng(vocab)
    speculation = SpeculationConfig(transfer="adaptive", eta=300, coupling=coupling)
    draws = [Draw(SamplingConfig(seed=seed), speculation, 0, seed) for seed in range(20)]
    questions = blocks(numbers, draws, vocab, is_witnessed=True, kind="usual")
    assert_specified(questions, ["one by one"])
    assert_specified(questions[:3], ["together"])


ASKED = st.tuples(
    st.lists(st.tuples(SAMPLINGS, SPECULATIONS), min_size=1, max_size=3),
    st.sampled_from([3, 17, 300, 2048]),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.booleans(),
    st.sampled_from([None, None, None, 2]),
    st.sampled_from(["usual", *ROWS]),
    st.integers(0, 2**32),
)


def ask_anything(ways, asked, vocab, dtype, is_witnessed, num_logprobs, kind, seed) -> None:
    numbers = np.random.default_rng(seed)
    draws = [
        Draw(sampling, speculation, int(numbers.integers(5)), int(numbers.integers(10_000)))
        for sampling, speculation in asked
        for _ in range(2)  # two of each, which are answered together
    ]
    judging = blocks(numbers, draws, vocab, is_witnessed=is_witnessed, rounds_to=dtype, kind=kind)
    judging = [replace(question, num_logprobs=num_logprobs) for question in judging]
    rows = [(question.logits[0], question.draw) for question in judging]
    plain = [ToDecode(*row, num_logprobs) for row in rows]
    assert_specified([*judging, *plain, *(ToPropose(*row) for row in rows)], ways)


@given(ASKED)
@settings(max_examples=150)
def test_whatever_is_asked_the_answers_are_the_specifications(asked):
    ask_anything(["one by one"], *asked)


@given(ASKED)
@settings(max_examples=5)
def test_whatever_is_asked_together_the_answers_are_the_specifications(asked):
    ask_anything(["together"], *asked)


@pytest.mark.slow
@given(ASKED)
@settings(max_examples=60)  # each takes up to two seconds beside other tests
def test_kernels_in_the_interpreter_give_the_answers_of_the_specification(asked):
    ask_anything(["together"], *asked)


@pytest.mark.parametrize("above", [1.0, 10.0, 17.0])
def test_a_long_flat_tail_is_not_lost_beside_one_likely_token(above):
    logits = torch.zeros(2, 2**17)
    logits[:, 77] = above
    exact = torch.softmax(logits.double(), dim=-1)
    row = Row.read(logits[0], 1.0, is_fine=False)
    np.testing.assert_allclose(row.probs(np.arange(2**17)), exact[0].numpy(), rtol=row.error / 5)


@pytest.fixture
def specifying(monkeypatch) -> list[ToJudge]:
    """The blocks that were left to the specification."""
    asked: list[ToJudge] = []
    plain = ToJudge.by_specification

    def note(question: ToJudge, *rest: Any, **rows: Any) -> Judgement:
        asked.append(question)
        return plain(question, *rest, **rows)

    monkeypatch.setattr(ToJudge, "by_specification", note)
    return asked


SETTINGS = [
    *((each, False, how) for each in get_args(Transfer) for how in get_args(Coupling)),
    *(("adaptive", True, coupling) for coupling in get_args(Coupling)),
]


def usual(num_blocks: int, transfer, is_witnessed, coupling, **sampling: Any) -> list[ToJudge]:
    speculation = SpeculationConfig(transfer=transfer, eta=5, coupling=coupling)
    draws = [
        Draw(SamplingConfig(seed=seed, **sampling), speculation, 0, 0) for seed in range(num_blocks)
    ]
    told_by = {"is_witnessed": is_witnessed, "rounds_to": torch.float32}
    return blocks(np.random.default_rng(1), draws, 500, **told_by)


@pytest.mark.parametrize("min_p", [0.0, 0.05])
@pytest.mark.parametrize(("transfer", "is_witnessed", "coupling"), SETTINGS)
def test_nearly_all_rows_of_usual_settings_need_no_specification(
    transfer, is_witnessed, coupling, min_p, specifying
):
    questions = usual(40, transfer, is_witnessed, coupling, min_p=min_p)
    expected = [told(question.by_specification()) for question in questions]
    specifying.clear()
    assert [told(one) for one in answer_questions(questions)] == expected
    assert len(specifying) <= len(questions) // 4


def test_blocks_of_all_settings_are_judged_in_one_batch(specifying):
    questions = [
        question
        for index, each in enumerate(SETTINGS)
        for question in usual(1, *each, temperature=0.5 + 0.1 * index)
    ]
    expected = [told(question.by_specification()) for question in questions]
    specifying.clear()
    assert len(together.make_batches(questions)) == 1
    answers = answer_together(questions)
    assert [told(one) for one in answers] == expected
    assert [one.num_specified for one in answers] == [0] * len(questions)
    assert not specifying


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sampling", [
    SamplingConfig(temperature=0), SamplingConfig(top_k=2), SamplingConfig(top_p=0.5),
    SamplingConfig(top_k=3, top_p=0.4), SamplingConfig(min_p=1),
])  # fmt: skip
def test_of_equal_tokens_the_specification_decides(way, sampling):
    for seed in range(20 if way == "one by one" else 1):
        draw = Draw(sampling.model_copy(update={"seed": seed}), SpeculationConfig(eta=0), 0, 0)
        for logits in (torch.zeros(5_000), torch.arange(5_000).remainder(3).float()):
            question = ToDecode(logits, draw)
            assert WAYS[way]([question]) == [specified(question)]


@pytest.mark.parametrize("way", WAYS)
def test_what_float32_does_not_tell_apart_the_specification_does(way):
    speculation = SpeculationConfig(transfer="boost", eta=1e-12)
    draw = Draw(SamplingConfig(temperature=0), speculation, 0, 0)
    block = drafted(torch.arange(50.0).flip(0)[None], draw)
    question = ToJudge(block, torch.arange(50)[None] * 1e-9, draw, frozenset())
    (judgement,) = WAYS[way]([question])
    assert judgement.token_ids == question.by_specification().token_ids == (49,)


@pytest.mark.parametrize("way", WAYS)
def test_of_two_best_tokens_the_lower_id_wins_though_the_other_was_proposed(way):
    speculation = SpeculationConfig(transfer="boost", eta=1, plausibility=0.5, draft_top_k=2)
    draw = Draw(SamplingConfig(temperature=0), speculation, 0, 0)
    proposed, rows = torch.zeros(1, 50), torch.zeros(1, 50)
    proposed[0, [1, 40]] = torch.tensor([10.0, 5.0])  # 40 is not plausible, so it keeps its weight
    rows[0, [1, 3, 40]] = torch.tensor([-9.0, 8.0, 8.0])
    question = ToJudge(drafted(proposed, draw), rows, draw, frozenset())
    (judgement,) = WAYS[way]([question])
    assert judgement.token_ids == question.by_specification().token_ids == (3,)


@pytest.mark.parametrize("way", WAYS)
def test_a_filter_of_the_best_takes_others_for_what_the_proposal_moves_down(way):
    speculation = SpeculationConfig(transfer="distill", eta=10, plausibility=0.001)
    proposed, rows = torch.zeros(1, 5_000), torch.zeros(1, 5_000)
    proposed[0, [0, 1]] = torch.tensor([20.0, 15.0])
    rows[0, [0, 1, 2, 5]] = torch.tensor([-20.0, 9.0, 9.0, 8.6])
    tokens = set()
    for seed in range(10):
        draw = Draw(SamplingConfig(top_k=2, seed=seed), speculation, 0, 0)
        question = ToJudge(drafted(proposed, draw), rows, draw, frozenset())
        (judgement,) = WAYS[way]([question])
        assert judgement.token_ids == question.by_specification().token_ids
        tokens |= {*judgement.token_ids}
    assert tokens == {2, 5}


@pytest.mark.parametrize("coupling", get_args(Coupling))
@pytest.mark.parametrize("way", WAYS)
def test_a_sure_target_whose_one_token_is_moved_down_to_nothing_is_specified(way, coupling):
    speculation = SpeculationConfig(transfer="distill", eta=60, coupling=coupling)
    proposed, rows = torch.zeros(1, 5_000), torch.zeros(1, 5_000)
    proposed[0, [7, 8]] = torch.tensor([20.0, 20.2])
    rows[0, 7] = 45.0
    for seed in range(5):
        draw = Draw(SamplingConfig(temperature=0.1, seed=seed), speculation, 0, 0)
        question = ToJudge(drafted(proposed, draw), rows, draw, frozenset())
        assert WAYS[way]([question]) == [question.by_specification()]


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter, in numpy
@pytest.mark.parametrize("way", WAYS)
def test_logits_that_are_not_numbers_end_their_own_answer_only(way):
    draw = Draw(SamplingConfig(), SpeculationConfig(), 0, 0)
    (good,) = blocks(np.random.default_rng(0), [draw], 50)
    bad = replace(good, logits=torch.full_like(good.logits, torch.nan))
    moved = replace(good, witness=torch.full_like(good.logits, torch.nan))
    broken: list[Question] = [
        moved,
        bad, ToDecode(bad.logits[0], draw), ToPropose(bad.logits[0], draw)
    ]  # fmt: skip
    first, *others, last = WAYS[way]([good, *broken, good])
    assert told(first) == told(last) == told(good.by_specification())
    assert all(isinstance(other, EngineFailed) for other in others)
    with pytest.raises(EngineFailed, match="not numbers"):
        judge_block(bad)


@pytest.mark.parametrize("way", WAYS)
def test_a_block_with_a_row_more_ends_with_a_token_of_the_target(way):
    draw = Draw(SamplingConfig(), SpeculationConfig(eta=0), 0, 0)
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(0))
    block = drafted(logits[:3], draw)
    question = ToJudge(block, logits, draw, frozenset())
    (judgement,) = WAYS[way]([question])
    assert judgement == question.by_specification()
    assert len(judgement.token_ids) == 4
    nothing = DraftBlock("lease", 0, 0, *(part[:0] for part in (
        block.token_ids, block.candidate_ids, block.candidate_probs
    )))  # fmt: skip
    empty = replace(question, block=nothing, logits=logits[:1])
    assert WAYS[way]([empty]) == [empty.by_specification()]


def strange(block: DraftBlock) -> dict[str, DraftBlock]:
    twice = block.candidate_ids.copy()
    twice[:, 1] = twice[:, 0]
    last_first = np.full_like(block.candidate_ids, -1)
    last_first[:, 1:] = block.candidate_ids[:, :-1]
    return {"twice": replace(block, candidate_ids=twice),
            "padding first": replace(block, candidate_ids=last_first)}  # fmt: skip


@pytest.mark.parametrize("case", ["twice", "padding first"])
def test_proposals_in_a_form_that_no_drafter_sends_are_left_to_the_specification(case):
    draw = Draw(SamplingConfig(), SpeculationConfig(), 0, 0)
    (question,) = blocks(np.random.default_rng(3), [draw], 50)
    question = replace(question, block=strange(question.block)[case])
    assert not is_within_reach(question)
    assert not together.make_batches([question])
    assert_specified([question])


def test_a_transfer_rule_without_a_fast_form_is_left_to_the_specification():
    another = SpeculationConfig().model_copy(update={"transfer": "another"})
    draw = Draw(SamplingConfig(), another, 0, 0)
    (question,) = blocks(np.random.default_rng(3), [draw], 50)
    assert not is_within_reach(question)


def test_from_a_long_vocabulary_only_the_candidates_numbers_are_drawn():
    draw = Draw(SamplingConfig(seed=5), SpeculationConfig(), 0, 0)
    logits = torch.randn(4, 60_000, generator=torch.Generator().manual_seed(0))
    assert_specified([ToPropose(row, draw.after(i)) for i, row in enumerate(logits)])


def test_a_cpu_leaves_short_vocabularies_to_the_specification(monkeypatch):
    monkeypatch.setattr("rapid.speculation.fast.step._LONG", 51)
    monkeypatch.setattr("rapid.speculation.fast.step.judge_by_rows", None)
    monkeypatch.setattr("rapid.speculation.fast.step.draw_token", None)
    draw = Draw(SamplingConfig(), SpeculationConfig(), 0, 0)
    (question,) = blocks(np.random.default_rng(0), [draw], 50)
    decoding = ToDecode(question.logits[0], draw)
    assert answer_questions([question, decoding]) == [specified(question), specified(decoding)]


def test_what_is_computed_at_once_is_part_of_the_memory_plan():
    assert together.MOST_ROWS == shapes._JUDGED_ROWS
    draw = Draw(SamplingConfig(), SpeculationConfig(eta=0), 0, 0)
    questions = blocks(np.random.default_rng(0), [draw] * 60, 20)
    batches = together.make_batches(questions)
    rows = [sum(len(question.block) for question in batch.questions) for batch in batches]
    assert len(rows) > 1
    assert max(rows) <= together.MOST_ROWS
    assert [index for batch in batches for index in batch.indices] == list(range(len(questions)))


@pytest.mark.parametrize("seed", range(10))
def test_drafts_are_drawn_on_their_device_as_propose_draws_them(seed):
    """Of any settings at once; what the host makes of the same candidates counts."""
    numbers = np.random.default_rng(seed)
    torch.manual_seed(seed)
    vocab = int(numbers.integers(3, 400))
    questions = [
        ToPropose(
            torch.randn(vocab) * 4,
            Draw(
                SamplingConfig(
                    temperature=float(numbers.choice([0, 0.3, 1, 2])),
                    top_k=numbers.choice([None, 5, 1000]),
                    top_p=float(numbers.choice([1, 0.8])),
                    min_p=float(numbers.choice([0, 0.1])),
                    seed=int(numbers.integers(-(2**63), 2**63)),
                ),
                SpeculationConfig(
                    draft_top_k=numbers.choice([None, 1, 7, 64]),
                    coupling=numbers.choice(get_args(Coupling)),
                ),
                int(numbers.integers(5)),
                int(numbers.integers(10_000)),
            ),
        )
        for _ in range(8)
    ]
    drawn = [step.draw_together(part) for part in (questions, questions[:3])]
    expected = [told(specified(question)) for question in questions]
    for read, part in zip(step.read_drafts(drawn), (expected, expected[:3]), strict=True):
        assert [told(answer) for _, answer in read] == part
        assert [token for token, _ in read] == [token for token, *_ in part]


def test_a_draft_from_no_numbers_is_refused_when_it_is_read():
    rows = [torch.randn(20), torch.full((20,), math.nan)]
    draw = Draw(SamplingConfig(seed=1), SpeculationConfig(), 0, 0)
    drawn = step.draw_together([ToPropose(row, draw) for row in rows])
    ((_, good), (token, refused)), *_ = step.read_drafts([drawn])
    assert isinstance(good, Proposed)
    assert isinstance(refused, EngineFailed)
    assert 0 <= token < 20  # which feeds a forward whose rows are dropped


def test_requests_of_one_step_are_drawn_at_their_own_temperatures():
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    draws = [
        Draw(SamplingConfig(temperature=temperature, seed=seed), SpeculationConfig(), 0, 0)
        for temperature in (0.05, 1, 2)
        for seed in range(5)
    ]
    assert_specified([ToDecode(logits, draw) for draw in draws])


def test_kernels_are_used_where_they_answer_as_the_specification_does(monkeypatch, caplog):
    assert step.has_kernels.__wrapped__(torch.device("cpu"))
    assert not caplog.records
    with monkeypatch.context() as patch:
        patch.setattr(step, "answer_together", lambda questions: [Decoded(0)] * len(questions))
        assert not step.has_kernels.__wrapped__(torch.device("cpu"))
        patch.setattr(step, "answer_together", lambda questions: [EngineFailed("no device")])
        assert not step.has_kernels.__wrapped__(torch.device("cpu"))
    assert [record.message.split(", and")[0].split(":")[0] for record in caplog.records] == [
        "kernels that draw tokens disagree with the specification",
        "kernels that draw tokens fail",
    ]


def test_nothing_asked_is_nothing_answered():
    assert list(answer_questions([])) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("sampling", [
    SamplingConfig(), SamplingConfig(temperature=0), SamplingConfig(top_k=50, top_p=0.9),
    SamplingConfig(min_p=0.05),
])  # fmt: skip
@pytest.mark.parametrize("coupling", get_args(Coupling))
@pytest.mark.parametrize("transfer", get_args(Transfer))
def test_a_cuda_device_says_what_the_host_says(transfer, coupling, sampling):
    speculation = SpeculationConfig(transfer=transfer, coupling=coupling)
    draws = [Draw(sampling, speculation, choice, 0) for choice in range(6)]
    on_host = blocks(np.random.default_rng(0), draws, 32_000, rounds_to=torch.float32)
    there = [replace(question, logits=question.logits.cuda()) for question in on_host]
    token_ids: Callable[[Any], Any] = lambda said: [one.token_ids for one in said]  # noqa: E731
    assert token_ids(answer_questions(there)) == token_ids(answer_questions(on_host))


def test_what_a_temperature_leaves_too_close_is_not_sure_to_be_best():
    """p is a float64: it rounds an exponent, which is the logit over the temperature."""
    for temperature, is_sure in ((0.5, True), (2.0, False)):
        logits = np.array([0.0, -FINE], np.float32)
        assert best_logit(logits, temperature) == (0, is_sure)


def test_a_race_that_lasts_too_long_is_not_sure():
    """In about one race of 1,100 a token that was not looked at may have won."""
    logits, unsure = torch.zeros(2048), 0
    logits[0] = math.log(2 * MANY)  # so that a token of mean weight is not looked at
    for seed in range(6000):
        draw = Draw(SamplingConfig(seed=seed), SpeculationConfig(), 0, 0)
        unsure += not draw_token(logits, draw)[1]
    assert 1 <= unsure <= 30


@pytest.mark.parametrize(("top_p", "is_sure"), [(0.5, False), (0.6, True)])
def test_a_nucleus_that_ends_at_the_border_is_not_sure(top_p, is_sure):
    """Rounding decides whether the third of four equal tokens is within."""
    logits = torch.full((2048,), -math.inf)
    logits[:4] = 0
    draw = Draw(SamplingConfig(seed=1, top_p=top_p), SpeculationConfig(), 0, 0)
    assert draw_token(logits, draw)[1] == is_sure


@pytest.mark.parametrize(("slack", "is_sure"), [(0.0, True), (0.02, False)])
def test_a_token_that_is_cut_by_less_than_its_weight_is_known_is_not_sure(slack, is_sure):
    row = Row.read(torch.zeros(2048), 1.0, is_fine=True)
    moved = Fused(
        row, np.array([0, 1]), np.array([0.3, 0.29]), np.array([0.0, slack]), share=0.41 / 2046
    )
    draw = Draw(SamplingConfig(seed=1, top_k=1), SpeculationConfig(), 0, 0)
    assert contenders._filter(moved, draw)[1] == is_sure
