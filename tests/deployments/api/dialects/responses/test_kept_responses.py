"""Responses that are kept: come back to, continued and deleted, through OpenAI's SDK."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import openai
import pytest

from deployments.api.ingress import Ingress
from rapid.errors import LibraryUnavailable
from rapid.events import Finished, TextDelta
from rapid.receipt import ChunkUsed, Citation, Citations
from tests.deployments.api.dialects.responses.test_responses_by_sdk import CALLS, THOUGHT, WEATHER
from tests.deployments.api.files.test_files_by_sdk import TEXT, World, world  # pytest.mark.slow
from tests.deployments.scripted import STARTED, ScriptedOrchestrator, receipt

__all__ = ["world"]


async def test_a_response_is_come_back_to_and_deleted(world: World):
    client = world.client()
    made = await client.responses.create(model="m", input="Hi", metadata={"a": "b"})
    again = await client.responses.retrieve(made.id)
    assert again == made
    items = [each async for each in client.responses.input_items.list(made.id)]
    assert [(each.type, each.content[0].text) for each in items] == [("message", "Hi")]  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        await client.responses.cancel(made.id)
    await client.responses.delete(made.id)
    for call in (client.responses.retrieve(made.id), client.responses.delete(made.id)):
        with pytest.raises(openai.NotFoundError):
            await call


async def test_another_ingress_and_no_other_tenant_finds_it(world: World):
    made = await world.client().responses.create(model="m", input="Hi")
    other = world.client("b")
    named: Any = [{"type": "item_reference", "id": made.output[0].id}]
    for call in (
        other.responses.retrieve(made.id),
        other.responses.delete(made.id),
        other.responses.cancel(made.id),
        other.responses.input_items.list(made.id),
        other.responses.create(model="m", input="Hi", previous_response_id=made.id),
        other.responses.create(model="m", input=named),
    ):
        with pytest.raises(openai.NotFoundError):
            await call
    world.app = Ingress(ScriptedOrchestrator(), world.config, library=world.access)
    assert (await world.client().responses.retrieve(made.id)).id == made.id


async def test_what_is_not_to_be_kept_is_not(world: World):
    made = await world.client().responses.create(model="m", input="Hi", store=False)
    assert made.model_extra is not None
    assert made.model_extra["store"] is False
    with pytest.raises(openai.NotFoundError):
        await world.client().responses.retrieve(made.id)


async def test_a_response_goes_on_from_another_without_its_instructions(world: World):
    client = world.client()
    file_id = await world.upload()
    await world.ingest()
    content: Any = [
        {"type": "input_file", "file_id": file_id},
        {"type": "input_text", "text": "First?"},
    ]
    first = await client.responses.create(
        model="m", instructions="Be brief.", input=[{"role": "user", "content": content}]
    )
    second = await client.responses.create(
        model="m", input="Second?", previous_response_id=first.id
    )
    assert second.previous_response_id == first.id
    third = await client.responses.create(
        model="m",
        input=[
            {"type": "item_reference", "id": second.output[0].id},  # type: ignore[typeddict-item]
            {"role": "user", "content": "Third?"},
        ],
    )
    assert third.output_text
    texts = [[each.text for each in sent.messages] for sent in world.service.requests]
    said = "Hello, wörld!"
    assert texts == [
        ["Be brief.", "First?"],
        ["First?", said, "Second?"],
        [said, "Third?"],
    ]
    attached = [[each.name for each in sent.documents] for sent in world.service.requests]
    assert attached == [["doors.txt"], ["doors.txt"], []]
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as refused:
        await client.responses.create(model="m", input="?", previous_response_id=second.id)
    assert refused.value.param == "previous_response_id"


async def test_vector_stores_stay_attached_until_others_are(world: World):
    client = world.client()
    files = [await world.upload(name=f"{number}.txt") for number in range(2)]
    stores = [(await client.vector_stores.create(file_ids=[each])).id for each in files]
    await world.ingest()

    async def ask(**fields: Any) -> str:
        return (await client.responses.create(model="m", input="Which?", **fields)).id

    first = await ask(tools=[{"type": "file_search", "vector_store_ids": stores[:1]}])
    second = await ask(previous_response_id=first, extra_body={"rapid": {"file_ids": files[1:]}})
    await ask(
        previous_response_id=second,
        tools=[{"type": "file_search", "vector_store_ids": stores[1:]}],
        tool_choice="none",
    )
    attached = [sorted(each.name for each in sent.documents) for sent in world.service.requests]
    assert attached == [["0.txt"], ["0.txt", "1.txt"], ["0.txt", "1.txt"]]


async def test_a_search_lists_passages_of_the_least_score_that_is_asked_for(world: World):
    client = world.client()
    file_id = await world.upload()
    store = (await client.vector_stores.create(file_ids=[file_id])).id
    await world.ingest()
    chunks = (ChunkUsed("a", "doors.txt", 0.5, 0, 10), ChunkUsed("b", "doors.txt", 0.9, 10, 20))
    said = Finished(replace(receipt(), chunks=chunks))
    listed: list[list[float]] = []
    for least in (0.4, 0.6, 0.95):
        world.service.script = [STARTED, TextDelta(0, "Hello", (), "stop"), said]
        options = {"score_threshold": least, "ranker": "auto"}
        tool: Any = {"type": "file_search", "vector_store_ids": [store], "ranking_options": options}
        answer: Any = await client.responses.create(
            model="m", input="Which?", tools=[tool], include=["file_search_call.results"]
        )
        listed.append([each.score for each in answer.output[0].results])
    assert listed == [[0.9, 0.5], [0.9], []]


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_search_lists_its_passages_and_a_citation_names_its_file(
    world: World, is_streamed: bool
):
    client = world.client()
    file_id = await world.upload()
    store = (await client.vector_stores.create(file_ids=[file_id])).id
    await world.ingest()
    said = receipt()
    cited = Citation(0, 0, 5, "copied", "doors.txt", None, 0, 20, TEXT[:20])
    chunks = (ChunkUsed("a", "doors.txt", 0.5, 0, 10), ChunkUsed("b", "doors.txt", 0.9, 10, 20))
    said = replace(said, chunks=chunks, citations=Citations((cited,), (), "measured"))
    world.service.script = [STARTED, TextDelta(0, "Hello", (), "stop"), Finished(said)]
    tool = {"type": "file_search", "vector_store_ids": [store], "max_num_results": 1}
    asked: Any = {
        "model": "m",
        "input": "Which?",
        "tools": [tool],
        "include": ["file_search_call.results"],
        "extra_body": {"rapid": {"citations": True}},
    }
    kinds: list[str] = []
    if is_streamed:
        async with client.responses.stream(**asked) as stream:
            kinds = [each.type async for each in stream]
            answer: Any = await stream.get_final_response()
        assert "response.file_search_call.searching" in kinds
        assert "response.output_text.annotation.added" in kinds
    else:
        answer = await client.responses.create(**asked)
    search, message = answer.output
    assert (search.type, search.status, search.queries) == (
        "file_search_call",
        "completed",
        ["Which?"],
    )
    (result,) = search.results
    assert (result.file_id, result.text, result.score) == (file_id, TEXT[10:20], 0.9)
    (annotation,) = message.content[0].annotations
    assert (annotation.type, annotation.file_id, annotation.index) == ("file_citation", file_id, 5)
    if is_streamed:
        again = await client.responses.retrieve(answer.id, stream=True)
        assert [each.type async for each in again] == kinds


async def test_words_of_a_file_without_its_layout_go_with_it(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    client, library = world.client(), await world.access.get()
    doors, walls = [await world.upload(name=name) for name in ("doors.txt", "walls.txt")]
    await world.ingest()
    chunks = tuple(ChunkUsed(each, f"{each}.txt", 0.5, 0, 10) for each in ("doors", "walls"))
    cited = Citation(0, 0, 5, "copied", "doors.txt", None, 0, 20, TEXT[:20])
    said = replace(receipt(), chunks=chunks, citations=Citations((cited,), (), "measured"))
    world.service.script = [STARTED, TextDelta(0, "Hello", (), "stop"), Finished(said)]
    layout = library.documents.layout

    async def lose(file_id: str) -> Any:
        if file_id == doors:
            raise LibraryUnavailable("Away.")
        return await layout(file_id)

    monkeypatch.setattr(library.documents, "layout", lose)
    rapid = {"file_ids": [doors, walls], "citations": True}
    made = await client.responses.create(model="m", input="Hi", extra_body={"rapid": rapid})
    told: Any = made.model_extra
    assert [each["file_id"] for each in told["rapid"]["chunks"]] == [doors, walls]
    assert [each.get("lines") for each in told["rapid"]["chunks"]] == [None, [1, 1]]
    await client.files.delete(doors)
    await world.ingest()
    left: Any = (await client.responses.retrieve(made.id)).model_extra
    assert left["rapid"]["citations"] == []
    assert [each["file_id"] for each in left["rapid"]["chunks"]] == [walls]


async def test_a_stream_is_told_again_after_any_of_its_events(world: World):
    client = world.client()
    asked: Any = {"top_logprobs": 1, "include": ["message.output_text.logprobs"]}
    stream = await client.responses.create(model="m", input="Hi", stream=True, **asked)
    told = [event.to_dict() async for event in stream]
    response_id = told[0]["response"]["id"]  # type: ignore[index]
    for after in (0, 5, len(told) - 1):
        rest = await client.responses.retrieve(response_id, stream=True, starting_after=after)
        assert [event.to_dict() async for event in rest] == told[after + 1 :]
    with pytest.raises(openai.BadRequestError, match="starting_after"):
        await client.responses.retrieve(response_id, stream=True, starting_after=-5)


async def test_calls_are_told_again_and_answered_by_their_id(world: World):
    client = world.client()
    world.service.script = CALLS
    asked: Any = {"model": "m", "input": "Rain?", "tools": [WEATHER]}
    told = [event.to_dict() async for event in await client.responses.create(stream=True, **asked)]
    response_id = told[0]["response"]["id"]  # type: ignore[index]
    again = await client.responses.retrieve(response_id, stream=True)
    assert [event.to_dict() async for event in again] == told
    results: Any = [
        {"type": "function_call_output", "call_id": f"call_{number}", "output": "Rain."}
        for number in (1, 2)
    ]
    await client.responses.create(model="m", input=results, previous_response_id=response_id)
    sent = world.service.requests[-1]
    assert [each.role for each in sent.messages] == ["user", "assistant", "tool", "tool"]


async def test_an_answer_is_given_also_if_it_cannot_be_kept(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    library = await world.access.get()

    async def fail(*_: Any) -> None:
        raise LibraryUnavailable("Away.")

    monkeypatch.setattr(library.responses, "keep", fail)
    answer = await world.client().responses.create(model="m", input="Hi")
    assert answer.output_text == "Hello, wörld!"
    assert answer.model_extra is not None
    assert answer.model_extra["store"] is False


async def test_a_response_expires(world: World):
    made = await world.client().responses.create(model="m", input="Hi")
    library = await world.access.get()
    row = await library.responses.get("a", made.id)
    await library.delete_expired(row.expires_at - 1)
    assert (await world.client().responses.retrieve(made.id)).id == made.id
    await library.delete_expired(row.expires_at)
    with pytest.raises(openai.NotFoundError):
        await world.client().responses.retrieve(made.id)


async def test_references_are_read_once_and_are_no_more_than_a_request_may_have(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    client = world.client()
    made = await client.responses.create(model="m", input="Hi")
    responses = (await world.access.get()).responses
    reads: list[int] = []
    read = responses.read

    async def count(*arguments: Any) -> Any:
        reads.append(1)
        return await read(*arguments)

    monkeypatch.setattr(responses, "read", count)
    named = {"id": made.output[0].id}
    asks: Any = {"model": "m", "input": [*[named] * 8, {"role": "user", "content": "Hi"}]}
    await client.responses.create(**asks)
    assert len(reads) == 1
    for limits, match in (
        ({"max_messages": 8}, "input has 9 entries, and this server takes 8"),
        ({"max_characters": 20}, "the prompt has 26 characters, and 20 are taken"),
    ):
        config = world.config.model_copy(update=limits)
        world.app = Ingress(ScriptedOrchestrator(), config, library=world.access)
        with pytest.raises(openai.BadRequestError, match=match):
            await world.client().responses.create(**asks)


@pytest.mark.parametrize("is_conversation", [True, False])
async def test_what_came_before_is_read_until_it_is_too_long(world: World, is_conversation: bool):
    client, last = world.client(), None
    named = (await client.conversations.create()).id
    for _ in range(4):
        before: Any = {"conversation": named} if is_conversation else {"previous_response_id": last}
        last = (await client.responses.create(model="m", input="x" * 20, **before)).id
    config = world.config.model_copy(update={"max_characters": 50})
    world.app = Ingress(ScriptedOrchestrator(), config, library=world.access)
    before = {"conversation": named} if is_conversation else {"previous_response_id": last}
    with pytest.raises(openai.BadRequestError, match="the prompt has 66 characters") as refused:
        await world.client().responses.create(model="m", input="Hi", **before)
    assert refused.value.param == next(iter(before))


async def test_what_came_before_counts_into_the_quota(world: World):
    made = await world.client().responses.create(model="m", input="x" * 5000)
    config = world.config.model_copy(update={"tokens_per_minute": 4000})
    world.app = Ingress(ScriptedOrchestrator(), config, library=world.access)
    client = world.client()
    await client.responses.create(model="m", input="Hi", max_output_tokens=1, store=False)
    with pytest.raises(openai.RateLimitError, match="this request may use 50"):
        await client.responses.create(
            model="m", input="Hi", max_output_tokens=1, previous_response_id=made.id
        )


async def test_an_answer_is_given_also_if_its_passages_are_gone(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    client = world.client()
    store = (await client.vector_stores.create(file_ids=[await world.upload()])).id
    await world.ingest()
    find, calls = (await world.access.get()).documents.find, 0

    async def find_once(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise LibraryUnavailable("Away.")
        return await find(*arguments)

    monkeypatch.setattr((await world.access.get()).documents, "find", find_once)
    tool: Any = {"type": "file_search", "vector_store_ids": [store]}
    answer: Any = await client.responses.create(
        model="m", input="Which?", tools=[tool], include=["file_search_call.results"]
    )
    assert calls > 1
    assert answer.output[0].results == []
    assert answer.output_text == "Hello, wörld!"


async def test_thinking_is_told_again_and_goes_on_with_its_message(world: World):
    service = ScriptedOrchestrator(*THOUGHT)
    world.app = Ingress(service, world.config, library=world.access)
    client = world.client()
    told = [
        each async for each in await client.responses.create(model="m", input="Hi", stream=True)
    ]
    made: Any = told[-1]
    again = await client.responses.retrieve(made.response.id, stream=True)
    assert [each async for each in again] == told
    await client.responses.create(model="m", input="And?", previous_response_id=made.response.id)
    assert [each.thinking for each in service.requests[1].messages] == ["", "Hm, well.", ""]
