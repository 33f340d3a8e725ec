"""A sequence keeps what was committed, and counts no KV as right that is not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rapid.engines.kv_cache import PageTable
from rapid.engines.sequences import Sequence

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
