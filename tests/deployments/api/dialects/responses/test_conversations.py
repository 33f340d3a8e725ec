"""Conversations through OpenAI's SDK: their items, and responses that read and add to them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from rapid.errors import LibraryUnavailable
from tests.deployments.api.files.test_files_by_sdk import World, world  # pytest.mark.slow

__all__ = ["world"]

SAID = "Hello, wörld!"


def say(text: str) -> Any:
    return {"type": "message", "role": "user", "content": text}


async def list_texts(world: World, conversation_id: str, **cut: Any) -> list[str]:
    items = world.client().conversations.items.list(conversation_id, **cut)
    return [each.content[0].text async for each in items]  # type: ignore[union-attr]


async def test_a_conversation_is_begun_changed_and_deleted(world: World):
    conversations = world.client().conversations
    made = await conversations.create(metadata={"a": "b"}, items=[say("one"), say("two")])
    assert made.id.startswith("conv_")
    assert (await conversations.retrieve(made.id)).metadata == {"a": "b"}
    assert (await conversations.update(made.id, metadata={"c": "d"})).metadata == {"c": "d"}
    added = await conversations.items.create(made.id, items=[say("three")])
    assert [each.role for each in added.data] == ["user"]  # type: ignore[union-attr]
    assert await list_texts(world, made.id, order="asc", limit=2) == ["one", "two", "three"]
    assert await list_texts(world, made.id) == ["three", "two", "one"]
    third = str(added.data[0].id)
    assert (await conversations.items.retrieve(third, conversation_id=made.id)).id == third
    assert (await conversations.items.delete(third, conversation_id=made.id)).id == made.id
    with pytest.raises(openai.NotFoundError):
        await conversations.items.retrieve(third, conversation_id=made.id)
    assert (await conversations.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await conversations.retrieve(made.id)


@pytest.mark.parametrize("is_kept", [True, False])
async def test_a_response_reads_its_conversation_and_adds_to_it(world: World, is_kept: bool):
    client = world.client()
    made = await client.conversations.create(items=[say("one")])
    answer = await client.responses.create(
        model="m", input="two", conversation=made.id, store=is_kept
    )
    assert answer.conversation is not None
    assert answer.conversation.id == made.id
    stream = await client.responses.create(
        model="m", input="three", conversation={"id": made.id}, stream=True, store=is_kept
    )
    assert [each.type async for each in stream][-1] == "response.completed"
    asked = [[each.text for each in sent.messages] for sent in world.service.requests]
    assert asked == [["one", "two"], ["one", "two", SAID, "three"]]
    whole = ["one", "two", SAID, "three", SAID]
    assert await list_texts(world, made.id, order="asc") == whole


async def test_another_tenant_has_no_part_in_it(world: World):
    made = await world.client().conversations.create(items=[say("one")])
    (item,) = [each async for each in world.client().conversations.items.list(made.id)]
    other = world.client("b")
    items, name = other.conversations.items, {"conversation_id": made.id}
    for call in (
        other.conversations.retrieve(made.id),
        other.conversations.update(made.id, metadata={}),
        other.conversations.delete(made.id),
        items.create(made.id, items=[say("two")]),
        items.list(made.id),
        items.retrieve(str(item.id), **name),
        items.delete(str(item.id), **name),
        other.responses.create(model="m", input="two", conversation=made.id),
    ):
        with pytest.raises(openai.NotFoundError) as refused:
            await call
        assert refused.value.param == "conversation"
    assert await list_texts(world, made.id) == ["one"]


async def test_what_cannot_be_an_item_is_refused_by_its_name(world: World):
    client = world.client()
    with pytest.raises(openai.BadRequestError) as refused:
        await client.conversations.create(items=[{"type": "message", "role": "x"}])  # type: ignore[list-item]
    assert refused.value.param == "items[0].role"
    with pytest.raises(openai.BadRequestError) as refused:
        await client.conversations.create(items=[say("x")] * 21)
    assert refused.value.param == "items"


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "reasoning", "id": 1}, "id"),
        ({"type": "reasoning", "id": {}}, "id"),
        (say("x") | {"id": []}, "id"),
        (say("\ud800"), "content"),
        ({"type": "reasoning", "summary": [float("nan")]}, "summary"),
        ({"type": "reasoning", "\ud800": 1}, ""),
        ({"type": "reasoning", "summary": json.loads("[" * 101 + "]" * 101)}, "summary"),
    ],
)
async def test_what_could_not_be_told_again_is_not_kept(world: World, item: Any, param: str):
    client = world.client()
    made = await client.conversations.create(items=[{"type": "reasoning", "id": None}])  # type: ignore[list-item,typeddict-item]
    asked = {"model": "m", "input": [say("Hi"), item], "conversation": made.id}
    for path, body, where in (
        ("/responses", asked, "input[1]"),
        (f"/conversations/{made.id}/items", {"items": [item]}, "items[0]"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.post(
                path,
                cast_to=object,
                content=json.dumps(body).encode(),
                options={"headers": {"content-type": "application/json"}},
            )
        assert refused.value.param == f"{where}.{param}".removesuffix(".")
    assert world.service.requests == []
    (kept,) = (await client.conversations.items.list(made.id)).data
    assert kept.type == "reasoning"


async def test_an_answer_that_its_conversation_cannot_take_is_an_error(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    library = await world.access.get()
    made = await world.client().conversations.create()

    async def fail(*_: Any) -> None:
        raise LibraryUnavailable("Away.")

    monkeypatch.setattr(library.responses, "keep", fail)
    with pytest.raises(openai.InternalServerError, match=r"Away\."):
        await world.client().responses.create(model="m", input="Hi", conversation=made.id)
