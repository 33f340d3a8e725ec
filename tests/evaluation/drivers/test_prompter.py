"""What target and drafter read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from evaluation.drivers import prompter as driver
from evaluation.drivers.prompter import evidence_found, open_prompter, target_chat, truncate_middle
from evaluation.items import Item
from evaluation.tasks import Condition
from rapid.chat_messages import Document, Message
from rapid.checkpoints.text import ChatText
from rapid.errors import ConfigurationError
from retrieval.chunking import RetrievedChunk
from retrieval.embeddings.embedding import Embedding, SparseVector, VectorSpace
from tests.evaluation.tiny_task import tiny_task

TEXT = "The harbor of Bakeno is dolu maki 482. " + "Nobody asked about the vault of Rowi. " * 40
ITEM = Item(
    "one",
    (Message("user", "What is the harbor of Bakeno?"),),
    Document("notes", TEXT),
    ("dolu maki 482",),
    fields={"choice_A": "dolu"},
    evidence=((0, 38),),
)


def words(text: str) -> list[tuple[int, int]]:
    return [match.span() for match in re.finditer(r"\S+", text)]


@pytest.fixture
async def prompter():
    text = ChatText.load("embedded:target")
    opened = await open_prompter(tiny_task(), [ITEM], text, text)
    yield opened
    await opened.close()


def test_a_long_text_loses_its_middle():
    text = "a b c d e f g"
    assert truncate_middle(text, words, 7) == text
    assert truncate_middle(text, words, 4) == "a b f g"
    assert truncate_middle(text, words, 3) == "a f g"


def test_a_template_is_filled_in_once():
    task = tiny_task(templates={"target": "{context} ({choice_A}) {question}", "drafter": "-"})
    document = Document("notes", "braces {question} stay")
    (message,) = target_chat(task, ITEM, document)
    assert message == Message("user", "braces {question} stay (dolu) What is the harbor of Bakeno?")


def test_a_field_that_an_item_lacks_is_named():
    task = tiny_task(templates={"target": "{choice_B}", "drafter": "-"})
    with pytest.raises(ConfigurationError, match=r"names \{choice_B\}, which item one has not"):
        target_chat(task, ITEM, None)


async def test_the_drafter_reads_what_was_found_within_the_budget(prompter):
    found = await prompter.retrieve(ITEM, Condition(retrieval_tokens=64))
    assert found.evidence_found
    assert found.chat[-1].content.startswith('Retrieved text chunks of "notes":\nThe harbor')
    assert len(prompter.encode(found, by_target=True)) < 130


class TwoMinds:
    """An embedder whose dense vectors like pilots, and whose term weights like vaults."""

    space = VectorSpace(dense_size=2, sparse=True)
    floor = 0.3

    def embed_passages(self, texts: Sequence[str]) -> list[Embedding]:
        return [self._embed("pilot" in text, "vault" in text) for text in texts]

    def embed_query(self, text: str) -> Embedding:
        return self._embed(True, True)

    def is_evidence(self, query: str, chunks: Sequence[RetrievedChunk]) -> bool:
        return bool(chunks)

    def _embed(self, is_pilot: bool, is_vault: bool) -> Embedding:
        cosine = 1.0 if is_pilot else 0.5
        dense = np.array([cosine, (1 - cosine**2) ** 0.5], dtype=np.float32)
        return Embedding(dense, SparseVector((1,), (1.0,)) if is_vault else SparseVector((), ()))


PILOTS = (
    "A pilot visited the harbor of Bakeno.",
    "A pilot wrote about the school.",
    "A pilot visited the school at dusk.",
)
RAIN, VAULT = "Rain fell on the harbor of Bakeno.", "The vault of Rowi is kiro 17."


@pytest.mark.parametrize(
    ("selection", "found"),
    [
        ("budget", [PILOTS[0], PILOTS[1], VAULT]),  # the vault is first in one of two rankings
        ("top-k", [*PILOTS]),  # three, which is 40 / 16, though the rain would fit as well
    ],
)
async def test_chunks_are_chosen_as_the_product_does_or_as_rapids_code(
    monkeypatch, selection, found
):
    monkeypatch.setattr(driver, "make_embedder", lambda config: TwoMinds())
    text = ChatText.load("embedded:target")
    document = Document("notes", "\n\n".join([PILOTS[0], RAIN, PILOTS[1], VAULT, PILOTS[2]]))
    item = replace(ITEM, document=document, evidence=())
    retrieval = {"chunk_tokens": 16, "tokens": 40, "embedder": "bge-m3", "selection": selection}
    prompter = await open_prompter(tiny_task(retrieval=retrieval), [item], text, text)
    chunks = (await prompter.retrieve(item, Condition())).chunks
    await prompter.close()
    assert [chunk.text.strip() for chunk in chunks] == found


async def test_where_the_search_missed_the_budget_is_filled_from_the_same_document():
    text = ChatText.load("embedded:target")
    lines = [f"A pilot visited the harbor of Bakeno {day}." for day in ("last winter", "at dusk")]
    facts = [f"The vault of {name} is kiro 17." for name in ("Rowi", "Tozemi", "Zaso", "Luma")]
    document = Document("notes", "\n\n".join([TEXT[:38], *facts, *lines]))
    item, other = (
        replace(ITEM, document=document),
        replace(ITEM, id="other", document=Document("b", "x")),
    )
    prompter = await open_prompter(
        tiny_task(retrieval={"chunk_tokens": 24, "tokens": 48, "embedder": "lexical"}),
        [item, other],
        text,
        text,
    )
    found = await prompter.retrieve(item, Condition(corruption="missed"))
    await prompter.close()
    assert [chunk.text.strip() for chunk in found.chunks] == lines
    assert found.evidence_found is False


async def test_evidence_in_the_middle_that_is_cut_out_cannot_be_found(prompter):
    text = "Nobody asked about the vault of Rowi. " * 40
    buried = Item(
        ITEM.id,
        ITEM.messages,
        Document("notes", text + TEXT),
        (),
        evidence=((len(text), len(text) + 38),),
    )
    whole = await prompter.retrieve(buried, Condition())
    cut = await prompter.retrieve(buried, Condition(context_tokens=64))
    assert (whole.evidence_found, cut.evidence_found) == (True, False)
    long, short = (
        prompter.target_prompt(buried, each) for each in (Condition(), Condition(context_tokens=64))
    )
    assert len(short) < 130 < len(long)


@pytest.mark.parametrize("templates", [None, {"target": "{context}", "drafter": "{context}"}])
async def test_retrieval_finds_what_is_in_the_middle_that_the_target_does_not_read(templates):
    filler = "Nobody asked about the vault of Rowi. " * 40
    buried = replace(
        ITEM,
        document=Document("notes", filler + TEXT),
        evidence=((len(filler), len(filler) + 38),),
    )
    text = ChatText.load("embedded:target")
    opened = await open_prompter(
        tiny_task(context_tokens=64, templates=templates), [buried], text, text
    )
    try:
        found = await opened.retrieve(buried, Condition())
        assert len(opened.target_prompt(buried, Condition())) < 130
    finally:
        await opened.close()
    assert found.evidence_found
    assert "dolu maki 482" in found.chat[-1].content


async def test_of_a_dialogue_the_drafter_reads_the_turns_that_matter(prompter):
    turns = [Message("user", TEXT), Message("assistant", "I see."), *ITEM.messages]
    dialogue = Item("talk", tuple(turns), None, ITEM.answers)
    found = await prompter.retrieve(dialogue, Condition(retrieval_tokens=64))
    assert "harbor of Bakeno is dolu maki 482" in found.context
    assert found.chat[-1].content.endswith(ITEM.messages[-1].content)
    assert (
        len(prompter.encode(found, by_target=False))
        < len(prompter.target_prompt(dialogue, Condition())) / 3
    )


def test_evidence_may_be_broken_into_lines():
    assert evidence_found(ITEM, "...\nThe harbor of\nBakeno is dolu maki 482.") is True
    assert evidence_found(ITEM, "The harbor of Bakeno is unknown.") is False
    assert evidence_found(Item("x", ITEM.messages, None, ()), "anything") is None
