"""One question to a running server, and its answer as it streams."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from deployments.cli.questions.error_words import Asker, advise, is_of_option
from deployments.cli.questions.local_documents import NamedSize, check_sizes
from deployments.cli.questions.reading_pace import ReadingPace
from deployments.cli.server.server_client import (
    CONNECT_TIMEOUT_S,
    SILENCE_TIMEOUT_S,
    call,
    give_up,
    parse_body,
    refuse,
)
from deployments.cli.terminal import USAGE, Waiting, fail, note

if TYPE_CHECKING:
    import httpx

_PROGRESS = (": reading ", ": embedding ")
_DECISION = ": decided "
_LOOK_S = 5.0  # without a byte of the answer, before the server is asked what it waits for

Json = dict[str, Any]


@dataclass(slots=True)
class StreamedAnswer:
    """An answer, as far as it has come.

    Attributes:
        receipt: How it was made; empty until it is complete.
        final: The chunk with its usage.
    """

    text: str = ""
    receipt: Json = field(default_factory=dict)
    final: Json = field(default_factory=dict)


def list_cards(client: httpx.Client) -> list[Json]:
    """Return what the server says of its models, in their order; at least one."""
    cards: list[Json] = call(client, "GET", "/v1/models").get("data", [])
    if not cards:
        fail("the server has no model: is this a RAPID server?")
    return cards


def choose_card(cards: Sequence[Json], model: str | None) -> Json:
    """Return the card of a model; of the first where none is named, which is said."""
    if model is not None:
        return next((card for card in cards if card["id"] == model), {"id": model})
    first, *others = cards
    if others:
        names = ", ".join(card["id"] for card in others)
        note(f"{first['id']} answers; --model asks another: {names}")
    return first


def is_embedded(card: Json) -> bool:
    """Return whether a model understands generated documents only."""
    return bool(card.get("rapid", {}).get("embedded", False))


def stream_answer(
    client: httpx.Client,
    body: Json,
    card: Mapping[str, Any],
    answer: StreamedAnswer,
    show: Callable[[str], None],
    asker: Asker = "option",
    warn: Callable[[str], str | None] = lambda _: None,
    kept: Sequence[NamedSize] = (),
) -> None:
    """Send a question and follow its answer; a refusal or a lost connection ends the command.

    It waits as long as the server's card says that the server may be silent, and for ever where the
    card says nothing.

    Args:
        client: The connection.
        body: The body of ``POST /v1/chat/completions``, streamed and with progress.
        card: The model's.
        answer: What has come is added to it, so that who interrupts has it.
        show: Takes each piece of text.
        asker: How refusals name what was typed.
        warn: Returns what is to be said before the answer, given why it has its mode.
        kept: The server's files that the body names.
    """
    import httpx

    content = check_sizes(body, card, kept)
    documents = body["rapid"].get("documents", ())
    names = [document["name"] for document in documents]
    num_characters = sum(len(document["text"]) for document in documents)
    silence_s = card.get("rapid", {}).get("silence_s")
    longest_s = None if silence_s is None else SILENCE_TIMEOUT_S + silence_s
    pace = ReadingPace()
    about = f"asking about {num_characters:,} characters" if num_characters else "thinking"
    waiting = Waiting(about)

    def refuse_in_words(error: Json) -> NoReturn:
        waiting.stop()
        said = advise(error, names, num_characters, asker)
        fail(said, USAGE if is_of_option(error) else 1)

    request = client.build_request(
        "POST",
        "/v1/chat/completions",
        content=content,
        headers={"content-type": "application/json"},
        timeout=httpx.Timeout(longest_s, connect=CONNECT_TIMEOUT_S),
    )
    response: httpx.Response | None = None
    try:
        with _say_what_holds_up(client, waiting):
            response = client.send(request, stream=True)
        if response.status_code != 200:
            told = response.read()
            error = parse_body(told).get("error")
            if isinstance(error, dict) and error.get("message"):
                refuse_in_words(error)
            waiting.stop()
            refuse(response.status_code, told)
        for chunk in _chunks(response):
            if isinstance(chunk, str):
                if not chunk.startswith(_DECISION):
                    waiting.say(pace.tell(chunk.removeprefix(": ")))
                elif not answer.text and (warning := warn(chunk)) is not None:
                    note(warning)
                continue
            if "error" in chunk:
                refuse_in_words(chunk["error"])
            answer.receipt = chunk.get("rapid", answer.receipt)
            answer.final = chunk if chunk.get("usage") else answer.final
            for choice in chunk["choices"]:
                if text := choice["delta"].get("content"):
                    waiting.stop()
                    answer.text += text
                    show(text)
    except httpx.HTTPError as error:
        waiting.stop()
        give_up(client, error)
    finally:
        waiting.stop()
        if response is not None:
            response.close()
    if not answer.receipt:
        fail("the connection ended before the answer did: ask again")


@contextmanager
def _say_what_holds_up(client: httpx.Client, waiting: Waiting) -> Iterator[None]:
    """Say, while the block waits for the first byte of an answer, what the server waits for."""
    has_begun = threading.Event()
    thread = threading.Thread(target=_look, args=(client, waiting, has_begun), daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_begun.set()  # a look that is under way ends by itself


def _look(client: httpx.Client, waiting: Waiting, has_begun: threading.Event) -> None:
    import httpx

    began = time.monotonic()
    while not has_begun.wait(_LOOK_S):
        try:
            state = parse_body(client.get("/ready", timeout=_LOOK_S).content)
        except httpx.HTTPError:
            continue
        seconds = f"{time.monotonic() - began:.0f} s"
        if has_begun.is_set():
            return
        if state.get("ready"):
            waiting.say(f"queued, or looking for passages ({seconds})")
        else:
            waiting.say(f"loading: {state.get('reason', 'not ready yet')} ({seconds})")


def _chunks(response: httpx.Response) -> Iterator[Json | str]:
    """Yield the chunks and, as strings, the comments: how far the server is, and its decision."""
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))
        elif line.startswith((*_PROGRESS, _DECISION)):
            yield line


def document_objects(texts: Mapping[str, Any], places: Sequence[int | None] = ()) -> list[Json]:
    """Return documents as a request has them.

    Args:
        texts: The parsed texts by their names.
        places: For each, the number of the message that it came with; none where all came with the
            first.
    """
    found = [{"name": name, "text": parsed.text} for name, parsed in texts.items()]
    for document, place in zip(found, places, strict=False):
        if place is not None:
            document["message"] = place
    return found
