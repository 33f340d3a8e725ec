"""Response bodies: what JSON cannot say as it is, and what the times count from."""

from __future__ import annotations

import json
from dataclasses import replace

from deployments.api.dialects.chat.wire import (
    GrowingChoice,
    ReplyFrame,
    Timing,
    metrics,
    rapid_receipt,
)
from rapid.events import TextDelta, TokenText
from rapid.receipt import Citation, Citations, PassagesRead
from tests.deployments.scripted import receipt

FRAME = ReplyFrame("chatcmpl-1", 0, "m", "fp_1", has_logprobs=True, includes_usage=False)


def test_half_a_character_keeps_its_bytes():
    half = "😀".encode()[:2].decode("utf-8", "surrogateescape")
    choice = GrowingChoice()
    choice.add(TextDelta(0, "", (TokenText(half, -1.0),)))
    reply = FRAME.completion([choice], receipt(), Timing(0.0))
    (token,) = reply["choices"][0]["logprobs"]["content"]
    assert token["token"] == "\ufffd"
    assert token["bytes"] == [0xF0, 0x9F]


def test_minus_infinity_is_a_json_number():
    delta = TextDelta(0, "a", (TokenText("a", -0.1, (("b", float("-inf")),)),))
    chunk = FRAME.delta_chunk(delta)
    assert '"logprob": -9999.0' in json.dumps(chunk, allow_nan=False)


def test_a_receipt_names_the_engines_that_keep_kv_in_fp8():
    assert "kv_cache_dtype" not in rapid_receipt(receipt())
    kept = replace(receipt(), kv_cache_dtype={"target": "fp8"})
    assert rapid_receipt(kept)["kv_cache_dtype"] == {"target": "fp8"}


def test_a_receipt_says_what_a_follow_up_was_searched_for_with():
    assert "query" not in rapid_receipt(receipt())
    assert rapid_receipt(replace(receipt(), joined_query="A? B?"))["query"] == "A? B?"


def test_the_receipt_says_how_passages_were_read() -> None:
    assert "passages" not in rapid_receipt(receipt())
    read = PassagesRead("apart", 96, "0.990 of the overlap stays")
    assert rapid_receipt(replace(receipt(), passages=read))["passages"] == {
        "reading": "apart",
        "reused_tokens": 96,
        "reason": "0.990 of the overlap stays",
    }


def test_citations_are_in_the_receipt_of_who_asked_for_them():
    assert not {"citations", "unsupported", "needed"} & rapid_receipt(receipt()).keys()
    copied = Citation(0, 0, 5, "copied", "notes", "doc:0", 3, 8, "Hello")
    needed = Citation(1, 7, 12, "needed", "notes", "doc:1", 40, 90, "…", 3.5)
    cited = replace(receipt(2), citations=Citations((copied, needed), ((1, 0, 6),), "measured"))
    body = json.loads(json.dumps(rapid_receipt(cited)))
    assert body["citations"][0] == {
        "choice": 0,
        "start": 0,
        "end": 5,
        "evidence": "copied",
        "document": "notes",
        "passage_id": "doc:0",
        "document_start": 3,
        "document_end": 8,
        "quote": "Hello",
        "fall": None,
    }
    assert body["citations"][1]["fall"] == 3.5
    assert body["unsupported"] == [{"choice": 1, "start": 0, "end": 6, "no_source": True}]
    assert body["needed"] == "measured"


def test_times_are_what_the_caller_saw():
    body = metrics(receipt(), Timing(began=1.0, first_token=1.5, done=2.9))
    assert body["time_to_first_token_ms"] == 500
    assert body["generation_time_ms"] == 1400
    assert body["mean_itl_ms"] == 200  # 8 tokens
    assert body["queue_time_ms"] == 1
