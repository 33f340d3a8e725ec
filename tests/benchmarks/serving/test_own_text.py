"""`benchmarks/serving/own_text.py --url`: what a server's stream says, as a row of the table."""

from __future__ import annotations

import json

import httpx
import pytest

from benchmarks.serving import own_text
from rapid.chat_messages import Document

RECEIPT = {"mode": "fused", "timings_ms": {"retrieval": 40.2, "target_prefill": 120.0}}
USAGE = {"prompt_tokens": 90, "prompt_tokens_details": {"cached_tokens": 80}}
EVENTS = [
    {"choices": [{"delta": {"role": "assistant"}}]},
    {"choices": [{"delta": {"content": "1991"}}]},
    {"choices": [{"delta": {}, "finish_reason": "stop"}], "rapid": RECEIPT},
    {"choices": [], "usage": USAGE},
]


def server(events: list[dict[str, object]], asked: list[dict[str, object]]) -> httpx.Client:
    def reply(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        lines = [": reading 10 of 90 tokens", *(f"data: {json.dumps(e)}" for e in events)]
        return httpx.Response(200, text="\n\n".join([*lines, "data: [DONE]"]) + "\n\n")

    return httpx.Client(base_url="http://server", transport=httpx.MockTransport(reply))


def test_a_served_answer_is_timed_and_its_receipt_is_read() -> None:
    asked: list[dict[str, object]] = []
    book = Document("book", "The licence is of 1991.")
    answer = own_text.ask_server(server(EVENTS, asked), book, "When?", "auto")
    assert asked[0]["rapid"] == {
        "mode": "auto",
        "documents": [{"name": "book", "text": "The licence is of 1991."}],
    }
    assert 0 < answer["first_s"] <= answer["whole_s"]
    assert answer["mode"] == "fused"
    assert answer["ms"] == {"retrieval": 40, "target_prefill": 120, "drafter_prefill": 0}
    assert (answer["prompt_tokens"], answer["cached_tokens"]) == (90, 80)
    (row,) = [row for row in own_text.rows(answers(answer)) if row[0] == "cold"]
    assert row[3] == ""  # the CPU of a server is not seen


def answers(answer: dict[str, object]) -> list[dict[str, object]]:
    return [answer | {"name": name} for name in ("cold", "plain", "lossless", "auto")]


def test_an_error_within_the_stream_ends_the_script() -> None:
    broken = server([{"error": {"message": "the drafter has gone"}}], [])
    with pytest.raises(SystemExit, match="the drafter has gone"):
        own_text.ask_server(broken, Document("book", "text"), "When?", "auto")
