"""A sequence keeps what was committed, and counts no KV as right that is not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rapid.engines.kv.cache import PageTable
from rapid.engines.kv.rings import RingPool
from rapid.engines.kv.sequences import Sequence
from tests.rapid.engines.kv.test_rings import PLAN

TOKENS = st.lists(st.integers(0, 2), max_size=5)  # few ids, so that drafts are often right
ROUNDS = st.lists(st.tuples(TOKENS, st.integers(0, 6), TOKENS), max_size=12)


@given(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=6), rounds=ROUNDS)
def test_the_committed_prefix_survives_any_draft_and_any_verdict(prompt, rounds):
    sequence = Sequence(prompt, (), PageTable((), 16), capacity=1000)
    answer: list[int] = []
    written: dict[int, int] = {}  # position -> the token whose KV lies there
    for drafted, num_computed, committed in rounds:
        sequence.draft_ids = list(drafted)
        for token in sequence.pending(num_computed):
            written[sequence.num_computed] = token
            sequence.num_computed += 1
        sequence.commit(committed)
        answer += committed
        assert sequence.token_ids == [*prompt, *answer]
        assert sequence.num_generated == len(answer)
        assert sequence.draft_ids == []
        assert sequence.num_computed < len(sequence.token_ids)
        right = sequence.token_ids[: sequence.num_computed]
        assert [written[position] for position in range(sequence.num_computed)] == right
        assert sequence.pending() == sequence.token_ids[sequence.num_computed :]


@given(
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=6),
    rounds=st.lists(st.tuples(TOKENS, st.integers(0, 6), st.integers(0, 5), TOKENS), max_size=12),
)
def test_what_was_drafted_ahead_stays_only_behind_a_block_that_was_right(prompt, rounds):
    sequence = Sequence(prompt, (), PageTable((), 16), capacity=1000)
    written: dict[int, int] = {}
    for more, num_computed, num_offered, committed in rounds:
        sequence.draft_ids += more
        sequence.proposals += [(token, token) for token in more]  # what the token was drawn from
        sequence.num_offered = num_offered
        for token in sequence.pending(num_computed):
            written[sequence.num_computed] = token
            sequence.num_computed += 1
        drafted, before = list(sequence.draft_ids), len(sequence.token_ids)
        is_hit = sequence.commit(committed, keeps_ahead=True)
        assert sequence.token_ids[before:] == committed
        is_right = drafted[: len(committed)] == committed and len(committed) >= num_offered
        assert sequence.draft_ids == (drafted[len(committed) :] if is_right else [])
        assert is_hit == is_right
        assert [token for token, _ in sequence.proposals] == sequence.draft_ids
        tokens = [*sequence.token_ids, *sequence.draft_ids]
        assert sequence.num_computed < len(tokens)
        right = tokens[: sequence.num_computed]
        assert [written[position] for position in range(sequence.num_computed)] == right


def test_tokens_drawn_to_be_committed_are_never_handed_out_as_a_draft():
    sequence = Sequence([1], (), PageTable((), 16), capacity=1000)
    sequence.draft_ids = [1, 2]  # a decode that was cancelled: no proposals
    assert not sequence.commit([1], keeps_ahead=True)
    assert sequence.draft_ids == []


def test_the_kv_of_accepted_tokens_is_not_computed_again():
    sequence = Sequence([1, 2, 3], (), PageTable((), 16), capacity=1000)
    sequence.draft_ids = [4, 5, 6]
    sequence.num_computed = 6
    sequence.commit([4, 5, 9])  # two of three were right
    assert sequence.pending() == [9]
    sequence.draft_ids = [7, 8]
    sequence.num_computed += 3
    sequence.commit([7, 8])
    assert sequence.pending() == [8]  # its row gives the next logits


def test_what_is_pending_begins_where_the_kv_ends_also_within_a_draft():
    sequence = Sequence([1, 2, 3], (), PageTable((), 16), capacity=1000)
    sequence.draft_ids = [4, 5, 6]
    for num_computed, pending in ((2, [3, 4, 5, 6]), (3, [4, 5, 6]), (5, [6]), (6, [])):
        sequence.num_computed = num_computed
        assert sequence.pending() == pending
        assert sequence.pending(2) == pending[:2]


def test_a_ring_bounds_what_may_be_speculated_at_once():
    ring = RingPool(PLAN).take()
    assert Sequence([1], (), PageTable((), 16), 1000, ring=ring).room == PLAN.room < 1000
    assert Sequence([1], (), PageTable((), 16), 3, ring=ring).room == 3
