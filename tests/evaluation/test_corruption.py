from __future__ import annotations

import random
from dataclasses import replace

import pytest

from evaluation.corruption import choose_unrelated, contradiction, corrupt
from evaluation.items import Item
from evaluation.tasks import Condition
from rapid.chat_messages import Document, Message
from rapid.errors import ConfigurationError
from retrieval import Chunk, RetrievedChunk

SENTENCES = [
    "The rent due from Bakeno is dolu maki 482.",
    "A pilot praised the lake.",
    "The salt due from Tozemi is kiro 17.",
    "The captain of Zaso closed the school.",
]
TEXT = "\n\n".join(SENTENCES)


def item(name: str = "one", text: str = TEXT) -> Item:
    return Item(
        id=name,
        messages=(Message("user", "What is the rent due from Bakeno?"),),
        document=Document("contract", text),
        answers=(SENTENCES[0],),
        evidence=((0, len(SENTENCES[0])),),
    )


def found(scores=(0.9, 0.1, 0.5, 0.2)) -> list[RetrievedChunk]:
    chunks = []
    for index, (sentence, score) in enumerate(zip(SENTENCES, scores, strict=True)):
        start = TEXT.index(sentence)
        end = start + len(sentence)
        chunks.append(
            RetrievedChunk(f"d:{index}", "contract", start, end, sentence, words(sentence), score)
        )
    return chunks


SPARE = [Chunk(f"o:{i}", "other", i, i + 1, f"Unrelated sentence {i}.", 3) for i in range(9)]


def words(text: str) -> int:
    return len(text.split())


def corrupted(name: str, *, share: float = 1.0, budget: int = 100, of: Item | None = None):
    condition = Condition(name=name, corruption=name, share=share)  # type: ignore[arg-type]
    return corrupt(
        found(), condition, of or item(), SPARE, budget_tokens=budget, count_tokens=words
    )


def test_unrelated_keeps_nothing_but_the_name_under_which_chunks_are_shown():
    chunks = corrupted("unrelated")
    assert len(chunks) == len(SENTENCES)
    assert all(chunk.text.startswith("Unrelated") for chunk in chunks)
    assert {chunk.document for chunk in chunks} == {"contract"}


def test_empty_retrieval_leaves_a_model_its_memory():
    assert corrupted("empty") == []


def test_what_a_smaller_share_replaces_a_larger_one_replaces_too():
    kept = [
        {chunk.text for chunk in corrupted("replaced", share=share)} & set(SENTENCES)
        for share in (0.25, 0.5, 0.75)
    ]
    assert [len(each) for each in kept] == [3, 2, 1]
    assert kept[0] > kept[1] > kept[2]


def test_the_evidence_is_not_spared():
    lost = sum(
        SENTENCES[0] not in {c.text for c in corrupted("replaced", share=0.5, of=item(str(n)))}
        for n in range(200)
    )
    assert 60 < lost < 140  # half of them, 5.7 standard deviations


def test_the_same_item_meets_the_same_corruption():
    assert corrupted("unrelated") == corrupted("unrelated")
    assert corrupted("unrelated") != corrupted("unrelated", of=item("two"))


def test_a_contradiction_stands_beside_the_evidence_with_another_value():
    firsts = set()
    for number in range(20):
        chunks = corrupted("contradicting", of=item(str(number)))
        texts = [chunk.text for chunk in chunks]
        assert [text for text in texts if text in SENTENCES] == SENTENCES
        (liar,) = set(texts) - set(SENTENCES)
        assert liar.startswith("The rent due from Bakeno is ")
        assert not set(liar.rstrip(".").split()[-3:]) & {"dolu", "maki", "482"}
        assert abs(texts.index(liar) - texts.index(SENTENCES[0])) == 1
        firsts.add(texts.index(liar) == 0)
    assert firsts == {True, False}


def test_a_contradiction_pushes_out_the_chunk_of_least_score_that_is_not_evidence():
    budget = sum(map(words, SENTENCES))
    chunks = corrupted("contradicting", budget=budget)
    assert sum(chunk.num_tokens for chunk in chunks) <= budget
    texts = {chunk.text for chunk in chunks}
    assert SENTENCES[0] in texts
    assert set(SENTENCES) - texts == {SENTENCES[1], SENTENCES[3]}


def test_without_known_evidence_the_numbers_of_the_best_chunk_are_contradicted():
    unknown = replace(item(), evidence=())
    (liar,) = {c.text for c in corrupted("contradicting", of=unknown)} - set(SENTENCES)
    assert liar.startswith("The rent due from Bakeno is ")
    assert "482" not in liar


def test_words_of_the_question_and_words_that_come_twice_stay():
    said = contradiction(random.Random(0), item(text=TEXT + " kiro"), SENTENCES[2])
    assert said.startswith("The salt due from Tozemi is kiro ")
    assert said != SENTENCES[2]


def test_missed_is_the_best_text_of_the_document_that_does_not_hold_the_evidence():
    budget = words(SENTENCES[2]) + words(SENTENCES[3])
    texts = [chunk.text for chunk in corrupted("missed", budget=budget)]
    assert texts == [SENTENCES[2], SENTENCES[3]]


def test_what_holds_no_known_evidence_cannot_be_missed():
    with pytest.raises(ConfigurationError, match=r"missed .* item one is not known"):
        corrupted("missed", of=replace(item(), evidence=()))


def test_the_budget_holds_whatever_replaces():
    chunks = corrupted("unrelated", budget=7)
    assert sum(chunk.num_tokens for chunk in chunks) == 6


def test_unrelated_text_is_of_an_item_about_another_text():
    items = [item("one"), item("two"), item("three", text="Another text.")]
    assert choose_unrelated(items[0], items) is items[2]
    with pytest.raises(ValueError, match="another text"):
        choose_unrelated(items[0], items[:2])
