from hypothesis import given
from hypothesis import strategies as st

from retrieval.chunking import RetrievedChunk
from retrieval.ranking import select


def chunk(document_id, start, text, num_tokens, score):
    return RetrievedChunk(
        f"{document_id}:{start}", "name", start, start + len(text), text, num_tokens, score
    )


ranked = st.lists(
    st.builds(
        chunk,
        st.sampled_from(["a", "b"]),
        st.integers(0, 50),
        st.sampled_from(["one", "two", " one\n", "three", "four", "five"]),
        st.integers(1, 9),
        st.floats(0, 1),
    ),
    max_size=15,
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
    for left_out in set(ranked) - set(chosen):
        better = sum(c.num_tokens for c in chosen if c.score >= left_out.score)
        is_repeat = " ".join(left_out.text.split()) in texts
        assert is_repeat or left_out.num_tokens > budget - better


def test_a_chunk_that_does_not_fit_is_passed_over():
    best = chunk("a", 30, "best", 6, 0.9)
    long = chunk("a", 10, "long", 5, 0.8)
    short = chunk("a", 20, "short", 3, 0.1)
    assert select([best, long, short], 10) == [short, best]
