"""The questions and the tables of `benchmarks/text/recall.py`, without a model."""

from __future__ import annotations

from benchmarks.text import recall
from evaluation.loaders.real_text import split_of
from retrieval import LexicalEmbedder
from tests.retrieval.tokens import words


def test_questions_are_asked_of_their_own_and_of_other_documents_of_the_split():
    asked = recall.real_text("dev")
    elsewhere = [each for each in asked if each.kind == "elsewhere"]
    assert len(elsewhere) == 5 * sum(each.kind in recall.ANSWERED for each in asked) > 0
    for each in elsewhere:
        own = each.item.id.rpartition("-")[0]
        assert each.item.document.name != own
        assert split_of(each.item.document.name) == "dev"


async def test_what_is_retrieved_is_judged_by_evidence_and_coverage():
    asked = list(recall._generated("dev", "ledger", 500))

    class Text:
        token_offsets = staticmethod(words)

    outcomes = await recall.retrieve(asked, LexicalEmbedder(), Text(), 64, 320)
    assert [outcome.kind for outcome in outcomes] == [each.kind for each in asked]
    facts = [outcome for outcome in outcomes if outcome.kind == "fact"]
    assert facts
    assert all(each.is_found and each.is_evidence and each.coverage == 1 for each in facts)
    elsewhere = [outcome for outcome in outcomes if outcome.kind == "elsewhere"]
    assert not any(each.is_found for each in elsewhere)
    assert sum(each.is_evidence for each in elsewhere) < len(elsewhere) / 5


def test_false_positives_are_counted_where_nine_in_ten_answered_questions_pass():
    good = [recall.Outcome("fact", True, n / 10, n / 10, 0, True) for n in range(1, 11)]
    bad = [recall.Outcome("elsewhere", False, c, 0.15, 0, False) for c in (0.05, 0.15, 0.25, 0.3)]
    bad.append(recall.Outcome("unanswerable", False, 0.05, 0, 0, False))
    features = {"cosine": lambda each: each.cosine, "none": lambda each: 0.0}
    rows = recall.roc_rows("words", good + bad, features)
    assert [row[:4] for row in rows] == [
        ("words", "answered", against, by)
        for against in ("elsewhere", "unanswerable")
        for by in features
    ]
    by_cosine, by_nothing, hard, _ = rows
    assert (by_cosine[5][:4], by_cosine[6]) == ("0.50", "0.20")  # two of four are above 0.2
    assert (by_nothing[4], by_nothing[5][:4]) == ("0.500", "1.00")
    assert (hard[4], hard[5][:4]) == ("1.000", "0.00")
    assert recall.combination(good + bad)(good[-1]) > 0 > recall.combination(good + bad)(bad[0])
