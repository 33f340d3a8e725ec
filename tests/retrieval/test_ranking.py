import itertools
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval.chunking import RetrievedChunk, chunk_text, drop_shared
from retrieval.ranking import NOT_FOUND, fuse, rank, select
from tests.retrieval import tokens


def chunk(document_id, start, text, num_tokens, score):
    return RetrievedChunk(
        f"{document_id}:{start}", "name", start, start + len(text), text, num_tokens, score
    )


ranked = st.lists(
    st.builds(
        chunk,
        st.sampled_from(["a", "b"]),
        st.integers(0, 50).map(lambda place: 10 * place),
        st.sampled_from(["one", "two", " one\n", "three", "four", "five"]),
        st.integers(1, 9),
        st.floats(0, 1),
    ),
    max_size=15,
    unique_by=lambda each: each.id,
)


@given(ranked, st.integers(0, 40))
def test_a_context_keeps_its_budget_its_order_and_nothing_twice(ranked, budget):
    chosen = select(ranked, budget, ["b", "a"])
    assert sum(c.num_tokens for c in chosen) <= budget
    assert [(c.document_id != "b", c.start) for c in chosen] == sorted(
        (c.document_id != "b", c.start) for c in chosen
    )
    texts = [" ".join(c.text.split()) for c in chosen]
    assert len(texts) == len(set(texts))
    heard = {c.document_id: c for c in sorted(ranked, key=lambda c: c.score)}  # the best of each
    for left_out in set(ranked) - set(chosen):
        first = heard.values() if len(heard) > 1 else ()
        better = sum(c.num_tokens for c in chosen if c.score >= left_out.score or c in first)
        is_repeat = " ".join(left_out.text.split()) in texts
        assert is_repeat or left_out.num_tokens > budget - better


def test_each_relevant_document_is_heard_within_half_of_the_budget():
    """Many passages of one document would leave no room for the others."""
    many = [chunk("a", 2 * place, f"a{place}", 4, 0.9 - place / 100) for place in range(8)]
    other, weak = chunk("b", 0, "b", 4, 0.6), chunk("c", 0, "c", 4, 0.2)
    assert select([*many, other, weak], 16, "abc") == [*many[:3], other]
    assert select([*many, other, weak], 4) == many[:1]  # half of it holds nobody
    assert select(many, 16) == many[:4]
    others = [chunk(each, 0, each, 4, 0.6) for each in "bcdefgh"]
    assert select([*many, *others], 16, "abcdefgh") == [*many[:3], others[0]]


def test_a_chunk_that_does_not_fit_is_passed_over():
    best = chunk("a", 30, "best", 6, 0.9)
    long = chunk("a", 10, "long", 5, 0.8)
    short = chunk("a", 20, "short", 3, 0.1)
    assert select([best, long, short], 10) == [short, best]


TEXT = "".join(f"The code of door {number} is {number * 7}. " for number in range(40))


@given(st.lists(st.floats(0, 1), min_size=60, max_size=60), st.integers(0, 400))
def test_words_that_neighbours_share_are_read_once_and_cost_once(scores, budget):
    cut = chunk_text(TEXT, tokens.words, max_tokens=16, overlap=8)
    ranked = [RetrievedChunk(**asdict(c), score=s) for c, s in zip(cut, scores, strict=False)]
    chosen = select(ranked, budget)
    parts = drop_shared(chosen)
    assert sum(part.num_tokens for part in parts) <= budget
    assert all(part.end <= after.start for part, after in itertools.pairwise(parts))
    if budget >= len(tokens.words(TEXT)):
        assert "".join(part.text for part in parts) == TEXT
        assert chosen == ranked


def test_a_neighbour_costs_only_what_is_new():
    first, second, third = (
        RetrievedChunk(f"a:{n}", "a", 4 * n, 4 * n + 8, f"{n} of it.", 8, score, first_token=4 * n)
        for n, score in enumerate((0.5, 0.9, 0.7))
    )
    assert select([first, second, third], 8) == [second]
    assert select([first, second, third], 12) == [second, third]
    assert select([first, replace(second, score=0.1), third], 16) == [
        first,
        replace(second, score=0.1),
        third,
    ]  # the one between them says nothing new


scores = st.lists(
    st.one_of(st.just(NOT_FOUND), st.integers(-4, 9), st.floats(-1, 1)).map(float), max_size=40
)


def rank_plainly(scores):
    """Sort by score; then sort by place what a chain of differences within rounding joins."""
    falling = sorted(
        (at for at, each in enumerate(scores) if each > NOT_FOUND), key=lambda at: -scores[at]
    )
    chains: list[list[int]] = []
    for at in falling:
        if chains:
            before = scores[chains[-1][-1]]
            near = max(1e-6, 1e-5 * max(abs(before), abs(scores[at])))
            if before - scores[at] <= near:
                chains[-1].append(at)
                continue
        chains.append([at])
    return [(at, scores[chain[0]]) for chain in chains for at in sorted(chain)]


@given(scores)
def test_ranks_are_those_of_a_plain_sort(scores):
    ranked = rank(np.array(scores))
    pairs = [*zip(ranked.places.tolist(), ranked.scores.tolist(), strict=True)]
    assert pairs == rank_plainly(scores)
    for limit in range(1, len(scores) + 1):
        cut = rank(np.array(scores), limit)
        found = [*zip(cut.places.tolist(), cut.scores.tolist(), strict=True)]
        assert len(found) >= min(limit, len(pairs))
        assert found == pairs[: len(found)]


@pytest.mark.parametrize("weight", [None, 0.3])
@given(scores, st.data())
def test_a_limit_cuts_a_fused_ranking_and_moves_nothing(weight, scores, data):
    words = data.draw(st.lists(st.floats(0, 1), min_size=len(scores), max_size=len(scores)))
    both = rank(np.array(scores)), rank(np.array(words))
    whole = fuse(*both, len(scores), weight, len(scores))
    assert sorted(whole.places) == sorted(both[0].places)
    for limit in range(1, len(scores) + 1):
        cut = fuse(*both, len(scores), weight, limit)
        np.testing.assert_array_equal(cut.places[:limit], whole.places[:limit])
        np.testing.assert_array_equal(cut.scores[:limit], whole.scores[:limit])
