"""Documents that do not fit the target: refused, or read by the drafter alone, or in parts."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from rapid.answering.prompt.excerpts.sections import drop_worst, join_passages
from rapid.answering.prompt.prompting import RequestPrompts
from rapid.chat_messages import ChunkSizes, Document, Message
from rapid.checkpoints.text import ChatText
from rapid.citing.copies import CitingRule, find_claims, find_copies
from rapid.errors import PromptTooLong, RetrievalUnavailable
from rapid.messages import GenerateRequest
from rapid.receipt import ReadPart
from retrieval import LexicalEmbedder, RetrievalConfig, RetrievedChunk, Retriever, open_retriever
from tests.answered import receipt
from tests.local_pools import LocalApplication
from tests.ray_cluster import question

ATLAS = Document("atlas", "The lighthouse of Varo is white. " * 2000)
SMALL = {"max_context": 2048, "kv_cache_tokens": 8192}


def ask_long(mode: str = "auto", too_long: str = "sections", **fields: Any) -> GenerateRequest:
    rapid = {"too_long": too_long}
    fields = {"documents": (ATLAS,), "seed": 5, "max_tokens": 12} | fields
    return question("r", mode=mode, rapid=rapid, **fields)


def chunk(start: int, score: float = 2.5) -> RetrievedChunk:
    text = ATLAS.text[start : start + 33]
    return RetrievedChunk(f"d:{start}", "atlas", start, start + 33, text, 9, score)


@pytest.mark.parametrize("mode", ["auto", "fused", "lossless", "plain"])
async def test_the_target_reads_what_was_found_and_the_receipt_names_it(mode: str):
    app = LocalApplication(engine=SMALL)
    answered = receipt(await app.answered(ask_long(mode, explain=True)))
    assert answered.mode == {"auto": "fused"}.get(mode, mode)
    assert answered.sections == (ReadPart("atlas", 0, 33),)
    assert answered.explanation is not None
    text = ChatText.load("embedded:target").decode([*answered.explanation.target_prompt_ids])
    assert text.count("The lighthouse of Varo is white.") == 1


async def test_the_drafter_answers_alone_where_that_was_asked_for():
    app = LocalApplication(engine=SMALL)
    answered = receipt(await app.answered(ask_long("fused", "rag")))
    assert (answered.mode, answered.contract, answered.sections) == ("rag", "drafter", ())
    assert answered.reason.startswith("the documents do not fit the target")
    assert [each.id for each in answered.chunks] == ["d:0"]


async def test_what_fits_is_read_whole():
    app = LocalApplication(engine=SMALL)
    short = (Document("atlas", ATLAS.text[:330]),)
    for too_long in ("rag", "sections"):
        answered = receipt(await app.answered(ask_long("fused", too_long, documents=short)))
        assert (answered.mode, answered.sections) == ("fused", ())


async def test_nothing_is_cut_unasked_and_no_chat_is_cut_at_all():
    app = LocalApplication(engine=SMALL)
    with pytest.raises(PromptTooLong, match="too_long: sections"):
        await app.answered(ask_long(too_long="refuse"))
    assert app.retriever.queries == []
    talk = "word " * 5000
    for documents in ((), (ATLAS,)):
        with pytest.raises(PromptTooLong, match="2048"):
            await app.answered(ask_long(documents=documents, text=talk))


async def test_a_question_about_something_else_is_refused():
    app = LocalApplication(engine=SMALL)
    app.retriever.finds_nothing = True
    with pytest.raises(PromptTooLong, match="has to do with the question"):
        await app.answered(ask_long())


async def test_without_retrieval_it_says_to_ask_again():
    app = LocalApplication(engine=SMALL)
    app.retriever.fail = ConnectionError("store:6333 refused")
    with pytest.raises(RetrievalUnavailable, match="ask again") as caught:
        await app.answered(ask_long())
    assert "6333" not in str(caught.value)


async def test_without_a_drafter_that_reads_it_is_refused():
    app = LocalApplication(engine=SMALL, drafter="prompt_lookup")
    with pytest.raises(PromptTooLong):
        await app.answered(ask_long("lossless"))


class TestPrompt:
    TEXT = ChatText.load("embedded:target")
    LINES = tuple(f"The code of door {number} is {number * 7}.\n" for number in range(300))
    DOORS = Document("doors", "".join(LINES))
    RAIN = Document("rain", "It rains a lot in the north.\n" * 100)

    @pytest.fixture
    async def retriever(self) -> AsyncIterator[Retriever]:
        config = RetrievalConfig(chunk_tokens=32)
        found = await open_retriever(config, self.TEXT.token_offsets, LexicalEmbedder())
        yield found
        await found.close()

    @pytest.mark.parametrize("room", [80, 300, 1500])
    async def test_the_best_passages_fill_the_window_in_document_order(
        self, retriever: Retriever, room: int
    ):
        prompts = RequestPrompts(
            self.TEXT, self.TEXT, retriever, budget_tokens=64, budget_for=lambda _: 64
        )
        ask = (Message("user", "What is the code of door 212?"),)
        request = GenerateRequest("r", "acme", ask, documents=(self.RAIN, self.DOORS))
        ids, sections = await prompts.shorten_prompt(request, 2048, room)
        assert len(ids) <= room
        assert room < 1000 or len(ids) > 0.9 * room
        text = self.TEXT.decode(ids.tolist())
        assert "The code of door 212 is 1484." in text
        assert {each.document for each in sections} == {"doors"}
        assert [*sections] == sorted(sections, key=lambda each: each.start)
        gaps = itertools.pairwise(sections)
        assert all(one.end < other.start for one, other in gaps)
        parts = [self.DOORS.text[each.start : each.end].strip() for each in sections]
        assert "\n\n".join(parts) in text
        assert "rain" not in text
        prompts.close()

    async def test_what_passages_share_is_read_once(self, retriever: Retriever):
        prompts = RequestPrompts(
            self.TEXT, self.TEXT, retriever, budget_tokens=128, budget_for=lambda _: 128
        )
        doors = replace(self.DOORS, chunk_sizes=ChunkSizes(48, 24))
        ask = (Message("user", "What is the code of door 212?"),)
        request = GenerateRequest("r", "acme", ask, documents=(doors,))
        ids, sections = await prompts.shorten_prompt(request, 2048, 400)
        found = await prompts.drafter_prompt(request, num_tokens=4000, ignores_drafts=True)
        for read in (ids, found.prompt_ids):
            text = self.TEXT.decode(read.tolist())
            assert "The code of door 212 is 1484." in text
            assert all(text.count(f"door {number} is") <= 1 for number in range(300))
        assert 300 < len(ids) <= 400
        assert all(doors.text[each.start : each.end] == each.text for each in found.chunks)
        for parts in (sections, found.chunks):
            assert all(one.end <= other.start for one, other in itertools.pairwise(parts))
        spans = [found.prompt_ids[start:stop].tolist() for start, stop in found.passages]
        spelled = {self.TEXT.decode(each).strip() for each in spans}
        assert spelled == {each.text.strip() for each in found.chunks}
        (claim,) = find_claims(0, "The code of door 212 is 1484.", ask[0].text)
        find_copies([claim], (), found.chunks, CitingRule())
        assert len(claim.citations) == 1
        prompts.close()

    def test_the_best_passage_stays_whole_where_a_neighbour_is_dropped(self):
        ends = [*itertools.accumulate(map(len, self.LINES), initial=0)]
        first, best, last = (
            RetrievedChunk(
                f"d:{n}", "doors", ends[n], ends[n + 2], "".join(self.LINES[n : n + 2]), 2, score
            )
            for n, score in ((0, 1.0), (1, 3.0), (2, 2.0))
        )
        _, sections = join_passages([self.DOORS], [first, best, last])
        assert sections == (ReadPart("doors", 0, ends[4]),)

        def count(text: str) -> int:
            return len(text.split())

        for num_words, kept in ((7, (best, last)), (8, (best,))):  # a line has seven words
            assert drop_worst([first, best, last], num_words, count) == kept
        assert join_passages([self.DOORS], [best])[1] == (ReadPart("doors", ends[1], ends[3]),)

    async def test_what_does_not_fit_after_all_is_dropped_worst_first(self):
        chunks = [chunk(0, 1.0), chunk(66, 3.0), chunk(99, 2.0)]

        class Finding:
            async def retrieve(self, *_: object, **__: object) -> Any:
                return type("Found", (), {"chunks": chunks})

        prompts = RequestPrompts(
            self.TEXT, self.TEXT, Finding(), budget_tokens=64, budget_for=lambda _: 64
        )
        request = replace(ask_long(), documents=(ATLAS,))
        ids, sections = await prompts.shorten_prompt(request, 9000, 8000)
        assert sections == (ReadPart("atlas", 0, 33), ReadPart("atlas", 66, 132))
        _, sections = await prompts.shorten_prompt(request, 9000, len(ids) - 1)
        assert sections == (ReadPart("atlas", 66, 132),)
        prompts.close()
