"""Responses in the background, through OpenAI's SDK: their callers leave and come back."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseIncompleteEvent

from deployments.api.dialects.responses import responses_reply
from deployments.api.http.event_stream import frame_event
from deployments.api.ingress import Ingress
from library.accounts.callers import TENANT
from library.library_access import LibraryAccess
from library.responses import running_responses
from rapid.errors import LibraryUnavailable, PromptTooLong, TargetUnavailable
from rapid.events import Finished, TextDelta
from tests.deployments.api.dialects.responses.test_responses_by_sdk import CALLS, WEATHER
from tests.deployments.api.files.test_files_by_sdk import World, world  # pytest.mark.slow
from tests.deployments.scripted import STARTED, ScriptedOrchestrator, receipt
from tests.deployments.serving import served

__all__ = ["world"]

OF_A_REQUEST: ContextVar[str] = ContextVar("OF_A_REQUEST", default="")
ASK: Any = {"model": "m", "input": "Hi", "background": True}


@pytest.fixture(autouse=True)
async def taking(world: World, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ingress]:
    """The ingress that takes the requests; what it still answers at the end is given up."""
    monkeypatch.setattr("deployments.api.dialects.responses.background._TURN_S", 0.01)
    monkeypatch.setattr("deployments.api.dialects.responses.response_routes._LOOK_S", 0.01)
    taking = world.app
    yield taking
    for each in taking._background._running.values():
        each.give_up()
    await taking._background.finish()


class Halves:
    """An answer whose second half waits until it `goes_on`."""

    def __init__(self, world: World) -> None:
        self.goes_on = asyncio.Event()
        world.service.script = [
            STARTED,
            TextDelta(0, "Hello"),
            self.goes_on,
            TextDelta(0, ", you", (), "stop"),
            Finished(receipt()),
        ]


async def until(client: openai.AsyncOpenAI, response_id: str, *statuses: str) -> Any:
    """Return a response once it has one of some statuses."""
    response: Any = None
    while response is None or response.status not in statuses:
        response = await client.responses.retrieve(response_id)
    return response


async def follow(client: openai.AsyncOpenAI, response_id: str, after: int = -1) -> list[Any]:
    """Return the events after one of them, to the end."""
    asked: Any = {} if after < 0 else {"starting_after": after}
    stream = await client.responses.retrieve(response_id, stream=True, **asked)
    return [event.to_dict() async for event in stream]


async def stream_whole(client: openai.AsyncOpenAI) -> list[Any]:
    """Return the events of a new response in the background, to the end."""
    return [each.to_dict() async for each in await client.responses.create(**ASK, stream=True)]


async def stay_away(*_: Any) -> Any:
    raise LibraryUnavailable("Away.")


async def until_it_says(client: openai.AsyncOpenAI, response_id: str, text: str) -> None:
    said = ""
    while said != text:
        said = (await client.responses.retrieve(response_id)).output_text


@pytest.fixture
async def elsewhere(world: World) -> AsyncIterator[Ingress]:
    """Another ingress, in another process as far as the library knows."""
    access = LibraryAccess(world.access._config)
    yield Ingress(ScriptedOrchestrator(), world.config, library=access)
    await (await access.get()).close()


async def test_a_response_is_answered_while_nobody_waits(world: World):
    answer, client = Halves(world), world.client()
    made = await client.responses.create(**ASK, metadata={"a": "b"})
    assert (made.status, made.background, made.output) == ("queued", True, [])
    halfway = await until(client, made.id, "in_progress")
    assert halfway.usage is None
    await until_it_says(client, made.id, "Hello")
    answer.goes_on.set()
    ended = await until(client, made.id, "completed")
    assert (ended.output_text, ended.metadata) == ("Hello, you", {"a": "b"})
    assert (ended.usage.input_tokens, ended.usage.output_tokens) == (100, 8)
    assert ended.rapid["mode"] == "fused"
    again = await client.responses.create(model="m", input="So?", previous_response_id=made.id)
    assert again.output_text
    assert [each.text for each in world.service.requests[-1].messages] == [
        "Hi",
        "Hello, you",
        "So?",
    ]


async def test_what_one_ingress_answers_another_shows_and_tells(
    world: World, taking: Ingress, elsewhere: Ingress
):
    answer, client = Halves(world), world.client()
    made = await client.responses.create(**ASK)
    world.app = elsewhere
    other = world.client()
    following = asyncio.create_task(follow(other, made.id))
    await until_it_says(other, made.id, "Hello")
    answer.goes_on.set()
    told = await following
    assert told[-1]["type"] == "response.completed"
    assert [each["sequence_number"] for each in told] == [*range(len(told))]
    await taking._background.finish()
    assert await follow(client, made.id, 4) == told[5:]


async def test_who_follows_elsewhere_reads_what_is_said_only_when_it_grows(
    world: World, elsewhere: Ingress, monkeypatch: pytest.MonkeyPatch
):
    answer, client = Halves(world), world.client()
    made = await client.responses.create(**ASK)
    await until_it_says(client, made.id, "Hello")
    responses = (await elsewhere._library.get()).responses  # type: ignore[union-attr]
    get, find_progress = responses.get, responses.find_progress
    num_read, looks = 0, asyncio.Semaphore(0)

    async def read(*arguments: Any) -> Any:
        nonlocal num_read
        num_read += 1
        return await get(*arguments)

    async def look(*arguments: Any) -> Any:
        looks.release()
        return await find_progress(*arguments)

    monkeypatch.setattr(responses, "get", read)
    monkeypatch.setattr(responses, "find_progress", look)
    world.app = elsewhere
    following = asyncio.create_task(follow(world.client(), made.id))
    for _ in range(9):
        await looks.acquire()
    assert num_read == 1
    answer.goes_on.set()
    assert (await following)[-1]["type"] == "response.completed"


async def test_a_tenant_follows_so_many_responses_and_no_more(world: World):
    config = world.config.model_copy(update={"max_requests_per_tenant": 2})
    world.app = Ingress(world.service, config, library=world.access)
    answer = Halves(world)
    async with served(world.app) as url:  # as only a connection shows that a stream has begun
        client = openai.AsyncOpenAI(api_key="sk-a", base_url=f"{url}/v1", max_retries=0)
        made = await client.responses.create(**ASK)
        streams: Any = [await client.responses.retrieve(made.id, stream=True) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="You follow 2 responses") as refused:
            await client.responses.retrieve(made.id, stream=True)
        assert refused.value.code == "rate_limit_exceeded"
        answer.goes_on.set()
        for stream in streams:
            assert [each.type async for each in stream][-1] == "response.completed"
        assert (await follow(client, made.id))[-1]["type"] == "response.completed"
        await client.close()


async def test_a_stream_in_the_background_is_told_again(world: World):
    client = world.client()
    stream = await client.responses.create(**ASK, stream=True)
    told: list[Any] = [event.to_dict() async for event in stream]
    kinds = [each["type"].removeprefix("response.") for each in told]
    assert kinds[:3] == ["created", "queued", "in_progress"]
    assert kinds[-1] == "completed"
    statuses = [each["response"]["status"] for each in told[:3]]
    assert statuses == ["queued", "queued", "in_progress"]
    for after in (-1, 0, 3, len(told) - 1):
        assert await follow(client, told[0]["response"]["id"], after) == told[after + 1 :]


async def test_an_answer_goes_on_when_its_reader_hangs_up_and_is_read_on_later(world: World):
    answer = Halves(world)
    async with served(world.app) as url:  # as only a connection can be closed
        client = openai.AsyncOpenAI(api_key="sk-a", base_url=f"{url}/v1", max_retries=0)
        stream = await client.responses.create(**ASK, stream=True)
        told: list[Any] = []
        async for event in stream:
            told.append(event.to_dict())
            if told[-1]["type"] == "response.output_text.delta":
                break
        await stream.close()
        response_id, last = told[0]["response"]["id"], told[-1]["sequence_number"]
        rest: list[Any] = []
        resumed = await client.responses.retrieve(response_id, stream=True, starting_after=last)
        answer.goes_on.set()
        async for event in resumed:
            rest.append(event.to_dict())
        assert rest[-1]["type"] == "response.completed"
        assert told + rest == await follow(client, response_id)
        await client.close()


async def test_who_follows_here_has_each_event_once(world: World):
    answer, client = Halves(world), world.client()
    made = await client.responses.create(**ASK)
    following = [asyncio.create_task(follow(client, made.id, after)) for after in (0, 3)]
    await until_it_says(client, made.id, "Hello")
    answer.goes_on.set()
    one, two = await asyncio.gather(*following)
    assert [each["sequence_number"] for each in one] == [*range(1, len(one) + 1)]
    assert two == one[3:]


@pytest.mark.parametrize("is_here", [True, False])
async def test_a_response_is_cancelled_by_any_ingress_and_says_what_it_said(
    world: World, taking: Ingress, elsewhere: Ingress, is_here: bool
):
    Halves(world)
    client = world.client()
    made = await client.responses.create(**ASK)
    await until_it_says(client, made.id, "Hello")
    world.app = taking if is_here else elsewhere
    client = world.client()
    for _ in range(2):
        cancelled = await client.responses.cancel(made.id)
        assert (cancelled.status, cancelled.output_text) == ("cancelled", "Hello")
    await taking._background.finish()
    assert world.service.given_up.is_set()
    assert (await client.responses.retrieve(made.id)).status == "cancelled"
    *_, last = [each async for each in await client.responses.retrieve(made.id, stream=True)]
    assert isinstance(last, ResponseIncompleteEvent)
    assert (last.response.status, last.response.output_text) == ("cancelled", "Hello")
    with pytest.raises(openai.BadRequestError, match="is cancelled: go on from one") as refused:
        await client.responses.create(model="m", input="So?", previous_response_id=made.id)
    assert refused.value.param == "previous_response_id"


@pytest.mark.parametrize("is_here", [True, False])
async def test_who_follows_a_cancelled_response_is_told_its_end(
    world: World, elsewhere: Ingress, is_here: bool
):
    Halves(world)
    client = world.client()
    made = await client.responses.create(**ASK)
    following = asyncio.create_task(follow(client, made.id))
    await until_it_says(client, made.id, "Hello")
    world.app = world.app if is_here else elsewhere
    await world.client().responses.cancel(made.id)
    told = await following
    assert [each["sequence_number"] for each in told] == [*range(len(told))]
    assert told[-1]["type"] == "response.incomplete"
    assert told[-1]["response"]["status"] == "cancelled"


async def test_an_answer_that_ends_before_its_cancel_is_seen_tells_the_cancel(
    world: World, taking: Ingress, elsewhere: Ingress, monkeypatch: pytest.MonkeyPatch
):
    async def hold(ids: list[str], _: object) -> set[str]:
        return {*ids}

    answer, client = Halves(world), world.client()
    made = await client.responses.create(**ASK)
    following = asyncio.create_task(follow(client, made.id))
    await until_it_says(client, made.id, "Hello")
    monkeypatch.setattr(taking._background._memory, "renew", hold)
    world.app = elsewhere
    await world.client().responses.cancel(made.id)
    answer.goes_on.set()
    *_, last = await following
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")


@pytest.mark.parametrize("background", [True, False])
async def test_what_tells_a_whole_answer_is_written_beside_the_event_loop(
    world: World, background: bool, monkeypatch: pytest.MonkeyPatch
):
    written: list[tuple[str, bool]] = []

    def note(event: Any) -> bytes:
        written.append((event["type"], threading.current_thread() is threading.main_thread()))
        return frame_event(event)

    monkeypatch.setattr(responses_reply, "frame_event", note)
    asked = ASK | {"background": background, "stream": True}
    told = [each async for each in await world.client().responses.create(**asked)]
    kinds = [kind for kind, _ in written]
    assert kinds == [each.type for each in told]
    at = kinds.index("response.output_text.done")
    assert [on_loop for _, on_loop in written] == [each < at for each in range(len(kinds))]


async def test_one_that_has_ended_is_not_cancelled(world: World):
    client = world.client()
    made = await client.responses.create(**ASK)
    await world.app._background.finish()
    assert (await client.responses.cancel(made.id)).status == "completed"


async def test_a_deleted_response_is_answered_no_more(world: World):
    Halves(world)
    client, other = world.client(), world.client("b")
    made = await client.responses.create(**ASK)
    for call in (other.responses.cancel(made.id), other.responses.delete(made.id)):
        with pytest.raises(openai.NotFoundError):
            await call
    await client.responses.delete(made.id)
    await world.app._background.finish()
    assert world.service.given_up.is_set()
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (PromptTooLong("Too long.", "messages"), "context_length_exceeded", "Too long."),
        (TargetUnavailable("Lost."), "target_unavailable", "Lost."),
        (ZeroDivisionError("secret"), "internal_error", "The server made a mistake"),
    ],
)
@pytest.mark.parametrize("begins", [True, False])
async def test_a_failure_is_the_responses(
    world: World, error: Exception, code: str, told: str, begins: bool
):
    client = world.client()
    world.service.script = [*([STARTED, TextDelta(0, "Hel")] if begins else []), error]
    stream = await client.responses.create(**ASK, stream=True)
    events = [each.to_dict() async for each in stream]
    assert events[-1]["type"] == "response.failed"
    response_id: Any = events[0]["response"]["id"]  # type: ignore[index]
    failed = await client.responses.retrieve(response_id)
    assert (failed.status, failed.output_text) == ("failed", "Hel" if begins else "")
    assert failed.error is not None
    assert failed.error.code == code
    assert told in failed.error.message
    assert "secret" not in failed.error.message
    assert await follow(client, response_id) == events


async def test_a_response_whose_ingress_is_lost_has_failed(
    world: World, taking: Ingress, elsewhere: Ingress, monkeypatch: pytest.MonkeyPatch
):
    answer, client = Halves(world), world.client()
    made = await client.responses.create(**ASK)
    await until_it_says(client, made.id, "Hello")
    background, hangs = taking._background, asyncio.Event()

    async def hang(*_: Any) -> Any:
        hangs.set()
        await asyncio.Event().wait()

    running = (await world.access.get()).running
    renew = running.renew
    monkeypatch.setattr(running, "renew", hang)
    await hangs.wait()  # so that no renewal is under way that would come after the last one
    monkeypatch.setattr(running_responses, "LEASE_S", 0.0)
    await renew([made.id], [])  # which is the last sign of it
    world.app = elsewhere
    client = world.client()
    failed = await client.responses.retrieve(made.id)
    assert failed.error is not None
    assert (failed.status, failed.output_text) == ("failed", "Hello")
    assert "was lost" in failed.error.message
    told = await follow(client, made.id)
    assert told[-1]["type"] == "response.failed"
    assert (await client.responses.cancel(made.id)).status == "failed"
    answer.goes_on.set()  # if it was only slow, it says no more
    await background._running[made.id].task
    assert (await client.responses.retrieve(made.id)).to_dict() == failed.to_dict()
    assert background._renewing is not None
    background._renewing.cancel()


async def test_who_finds_its_lease_gone_gives_up(world: World, monkeypatch: pytest.MonkeyPatch):
    Halves(world)
    client = world.client()
    made = await client.responses.create(**ASK)
    await until(client, made.id, "in_progress")
    monkeypatch.setattr(running_responses, "LEASE_S", 0.0)
    await world.app._background.finish()
    assert world.service.given_up.is_set()
    assert (await client.responses.retrieve(made.id)).status == "failed"


async def test_an_end_is_kept_when_the_library_comes_back(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("deployments.api.dialects.responses.remembering._AGAIN_S", 0.01)
    answer, client = Halves(world), world.client()
    made = await client.responses.create(**ASK)
    running = (await world.access.get()).running
    end, was_away = running.end, asyncio.Event()

    async def away_once(*arguments: Any) -> bool:
        if not was_away.is_set():
            was_away.set()
            raise LibraryUnavailable("Away.")
        return await end(*arguments)

    monkeypatch.setattr(running, "end", away_once)
    answer.goes_on.set()
    assert (await until(client, made.id, "completed")).output_text == "Hello, you"
    assert was_away.is_set()


async def test_who_follows_is_told_an_end_though_the_library_stays_away(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("deployments.api.dialects.responses.remembering._AGAIN_S", 0.01)
    monkeypatch.setattr("deployments.api.dialects.responses.remembering.LEASE_S", 0.02)
    answer, client = Halves(world), world.client()
    following = asyncio.create_task(stream_whole(client))
    library = await world.access.get()
    monkeypatch.setattr(library.running, "end", stay_away)
    monkeypatch.setattr(library.responses, "get", stay_away)
    answer.goes_on.set()
    told = await following
    assert [each["sequence_number"] for each in told] == [*range(len(told))]
    assert (told[-1]["type"], told[-1]["response"]["output"][0]["content"][0]["text"]) == (
        "response.failed",
        "Hello, you",
    )
    assert "could not be kept" in told[-1]["response"]["error"]["message"]


async def test_an_end_that_is_kept_unsaid_is_told(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("deployments.api.dialects.responses.remembering._AGAIN_S", 0.01)
    running = (await world.access.get()).running
    end = running.end

    async def end_unsaid(*arguments: Any) -> bool:
        if await end(*arguments):
            raise LibraryUnavailable("Away once it was written.")
        return False

    monkeypatch.setattr(running, "end", end_unsaid)
    told = await stream_whole(world.client())
    assert told[-1]["type"] == "response.completed"
    assert told == await follow(world.client(), told[0]["response"]["id"])


async def test_who_follows_a_deleted_response_is_told_an_end(
    world: World, taking: Ingress, monkeypatch: pytest.MonkeyPatch
):
    Halves(world)
    client, is_followed = world.client(), asyncio.Event()
    find = taking._background.follow

    def note(*given: Any) -> AsyncIterator[bytes] | None:
        is_followed.set()
        return find(*given)

    monkeypatch.setattr(taking._background, "follow", note)
    made = await client.responses.create(**ASK)
    following = asyncio.create_task(follow(client, made.id))
    await until_it_says(client, made.id, "Hello")
    await is_followed.wait()  # who comes behind the deletion is told that there is none
    await client.responses.delete(made.id)
    assert (await following)[-1]["type"] == "response.failed"


async def test_it_holds_a_place_and_is_settled(world: World, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    config = world.config.model_copy(update={"max_requests_per_tenant": 1})
    world.app = Ingress(world.service, config, library=world.access)
    world.app._admission._wait_s = 0.0
    answer, client = Halves(world), world.client()
    made = await client.responses.create(**ASK)
    with pytest.raises(openai.RateLimitError):
        await client.responses.create(model="m", input="Hi")
    answer.goes_on.set()
    await world.app._background.finish()
    assert (await client.responses.retrieve(made.id)).status == "completed"
    await client.responses.create(model="m", input="Hi")
    lines: list[Any] = [each for each in caplog.records if hasattr(each, "completion_tokens")]
    assert [(each.outcome, each.completion_tokens) for each in lines] == [("ok", 8)] * 2


async def test_it_needs_to_be_kept(world: World):
    with pytest.raises(openai.BadRequestError) as refused:
        await world.client().responses.create(**ASK, store=False)
    assert refused.value.param == "store"
    assert world.service.requests == []


async def test_a_conversation_has_what_was_answered_when_it_has_ended(world: World):
    answer, client = Halves(world), world.client()
    named = (await client.conversations.create()).id

    async def items() -> list[str]:
        found: list[Any] = [each async for each in client.conversations.items.list(named)]
        return [each.content[0].text for each in found]

    made = await client.responses.create(**ASK, conversation=named)
    assert await items() == []
    answer.goes_on.set()
    await until(client, made.id, "completed")
    assert await items() == ["Hello, you", "Hi"]


async def test_calls_are_told_elsewhere_as_they_were_told_here(world: World, elsewhere: Ingress):
    world.service.script = CALLS
    client = world.client()
    stream = await client.responses.create(**ASK, tools=[WEATHER], stream=True)
    told = [each.to_dict() async for each in stream]
    world.app = elsewhere
    response_id: Any = told[0]["response"]["id"]  # type: ignore[index]
    assert await follow(world.client(), response_id) == told


async def test_a_server_that_stops_ends_its_answers_first(world: World):
    answer, client = Halves(world), world.client()
    said: asyncio.Queue[Any] = asyncio.Queue()
    heard: asyncio.Queue[Any] = asyncio.Queue()
    life = asyncio.create_task(world.app({"type": "lifespan"}, said.get, heard.put))
    await said.put({"type": "lifespan.startup"})
    assert (await heard.get())["type"] == "lifespan.startup.complete"
    made = await client.responses.create(**ASK)
    await said.put({"type": "lifespan.shutdown"})
    await until_it_says(client, made.id, "Hello")
    assert heard.empty()
    answer.goes_on.set()
    assert (await heard.get())["type"] == "lifespan.shutdown.complete"
    await life
    assert (await client.responses.retrieve(made.id)).status == "completed"


async def test_its_call_is_not_cancelled_with_the_request_that_asked(world: World):
    """Serve cancels calls that are made in the context of a request; see `contextvars`."""
    seen: list[str | None] = []
    begin = world.service.begin

    async def noting(*arguments: Any) -> Any:
        seen.append(TENANT.get())
        seen.append(OF_A_REQUEST.get())
        return await begin(*arguments)

    world.service.begin = noting  # type: ignore[method-assign]
    OF_A_REQUEST.set("of the request")
    await world.client().responses.create(**ASK)
    await world.app._background.finish()
    assert seen == ["a", ""]
