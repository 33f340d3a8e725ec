"""Follow-up questions find more of the drafter's prompt read; nobody's order depends on others."""

from __future__ import annotations

from collections.abc import Sequence

from rapid.answering.prompt.excerpts.passage_order import PassageOrder
from rapid.answering.prompt.prompt_tokens import find_passages
from rapid.answering.prompt.prompting import RequestPrompts
from rapid.chat_messages import Document, Message
from rapid.checkpoints.text import ChatText
from rapid.messages import GenerateRequest
from retrieval import RetrievedChunk
from tests.rapid.answering.prompt.test_prompting import (
    ScriptedRetriever,
    chat_text,
    context,
    prompter,
)

__all__ = ["chat_text"]
ACME, OTHER = ("acme", ""), ("other", "")


def passage(number: int, document: str = "atlas") -> RetrievedChunk:
    text = f"Passage {number} tells of the lighthouse and of its keeper. "
    return RetrievedChunk(f"d:{number}", document, 60 * number, 60 * number + 60, text, 12, 2.0)


def places(passages: Sequence[object]) -> list[int]:
    return [each.start // 60 for each in passages]  # type: ignore[attr-defined]


def numbered(*numbers: int) -> list[RetrievedChunk]:
    return [passage(number) for number in numbers]


def test_what_began_an_earlier_prompt_comes_first() -> None:
    order = PassageOrder()
    assert places(order.arrange(ACME, numbered(3, 5, 7))) == [3, 5, 7]
    assert places(order.arrange(ACME, numbered(1, 3, 5))) == [3, 5, 1]
    assert places(order.arrange(ACME, numbered(0, 1, 3, 5, 7))) == [3, 5, 1, 7, 0]


def test_the_earlier_prompt_with_the_longest_common_beginning_is_followed() -> None:
    order = PassageOrder()
    order.arrange(ACME, numbered(1, 2))
    order.arrange(ACME, numbered(4, 6, 8))
    assert places(order.arrange(ACME, numbered(1, 4, 6, 9))) == [4, 6, 1, 9]


def test_what_recurs_makes_a_new_beginning() -> None:
    order = PassageOrder()
    for numbers in ((0, 5), (1, 5), (2, 5)):
        order.arrange(ACME, numbered(*numbers))
    assert places(order.arrange(ACME, numbered(3, 4, 5))) == [5, 3, 4]
    assert places(order.arrange(ACME, numbered(4, 5, 9))) == [5, 4, 9]


def test_another_tenant_has_an_order_of_its_own() -> None:
    order = PassageOrder()
    order.arrange(ACME, numbered(3, 5))
    assert places(order.arrange(OTHER, numbered(1, 3))) == [1, 3]


def test_documents_stay_in_their_order() -> None:
    order = PassageOrder()
    order.arrange(ACME, [passage(7, "first"), passage(2, "second")])
    arranged = order.arrange(ACME, [passage(1, "first"), passage(7, "first"), passage(2, "second")])
    assert [each.document for each in arranged] == ["first", "first", "second"]
    assert places(arranged) == [7, 1, 2]


def test_only_the_last_prompts_and_owners_are_remembered() -> None:
    order = PassageOrder()
    order.arrange(ACME, numbered(9, 10))
    for number in range(40):
        order.arrange(ACME, numbered(100 + number))
    assert places(order.arrange(ACME, numbered(1, 9))) == [1, 9]
    for number in range(300):
        order.arrange((f"tenant {number}",), numbered(9))
    assert len(order._prompts) <= 256


async def read(prompts: RequestPrompts, *, ignores_drafts: bool) -> tuple[list[int], list[int]]:
    document = Document("atlas", "".join(passage(number).text for number in range(20)))
    asked = GenerateRequest("r", "acme", (Message("user", "Who?"),), documents=(document,))
    prompt = await prompts.drafter_prompt(asked, ignores_drafts=ignores_drafts)
    return prompt.prompt_ids.tolist(), places(prompt.chunks)


def test_a_passage_that_the_tokens_do_not_spell_is_left_out(chat_text: ChatText) -> None:
    token_ids = chat_text.encode("Head. One here.\n\nTwo here.\n\nThe question")
    known = find_passages(chat_text, token_ids, ["One here.", "Two here."])
    assert len(known) == 2
    assert find_passages(chat_text, token_ids, ["Not here.", "Two here."]) == known[1:]


async def test_a_follow_up_question_reads_less_anew(chat_text: ChatText) -> None:
    retriever = ScriptedRetriever(None)
    prompts, sizes = prompter(chat_text, retriever), dict[bool, int]()
    for ignores_drafts in (False, True):
        retriever.answer = context(*numbered(4, 6, 8, 10))
        first, _ = await read(prompts, ignores_drafts=ignores_drafts)
        retriever.answer = context(*numbered(2, 4, 6, 8, 10))
        second, chunks = await read(prompts, ignores_drafts=ignores_drafts)
        assert chunks == [2, 4, 6, 8, 10]  # receipts and citations name them in their order
        pairs = zip(first, second, strict=False)
        shared = next(n for n, (one, other) in enumerate(pairs) if one != other)
        sizes[ignores_drafts] = len(second) - shared
    assert sizes[True] < 0.5 * sizes[False]
    prompts.close()
