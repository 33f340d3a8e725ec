"""The unmodified OpenAI SDK against the real application."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from rapid.embedded.generator import generate_document
from tests.ray_cluster import wait_until

pytestmark = pytest.mark.ray

DOCUMENT = generate_document(7, 1000)
FACT = next(each for each in DOCUMENT.questions if each.question == "What is the banner of Tezawe?")


@pytest.fixture
def client(application: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{application}/v1", api_key="local", timeout=60, max_retries=0)


def asked(**fields: Any) -> dict[str, Any]:
    documents = [{"name": DOCUMENT.name, "text": DOCUMENT.text}]
    return {
        "model": "rapid-embedded",
        "messages": [{"role": "user", "content": FACT.question}],
        "temperature": 0,
        "extra_body": {"rapid": {"documents": documents}},
        **fields,
    }


def test_an_answer_is_right_and_says_how_it_came_about(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**asked(logprobs=True, top_logprobs=2))
    assert answer.choices[0].message.content == FACT.answer
    assert answer.choices[0].finish_reason == "stop"
    logprobs = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in logprobs) == FACT.answer
    assert all(entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob for entry in logprobs)
    receipt = answer.model_extra["rapid"]
    assert (receipt["mode"], receipt["contract"]) == ("fused", "fused")
    assert set(receipt["timings_ms"]) == {
        "queue", "retrieval", "target_prefill", "drafter_prefill", "witness_prefill",
        "draft", "verify",
    }  # fmt: skip
    assert all(ms > 0 for ms in receipt["timings_ms"].values())
    for chunk in receipt["chunks"]:
        assert chunk["document"] == DOCUMENT.name
        assert 0 <= chunk["start"] < chunk["end"] <= len(DOCUMENT.text)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    counters = answer.model_extra["metrics"]["speculative_decoding"]
    assert counters["num_accepted_draft_tokens"] == receipt["accepted"] > 0


def test_a_file_is_kept_indexed_asked_about_and_deleted(client: openai.OpenAI) -> None:
    file = client.files.create(file=("report.txt", DOCUMENT.text.encode()), purpose="user_data")
    wait_until(lambda: client.files.retrieve(file.id).status == "processed", 60)
    store = client.vector_stores.create(file_ids=[file.id])
    wait_until(lambda: client.vector_stores.retrieve(store.id).status == "completed", 60)
    (best, *_) = client.vector_stores.search(store.id, query=FACT.question).data
    assert FACT.answer.split()[-1] in best.content[0].text
    texts = []
    for named in ({"file_ids": [file.id]}, {"vector_store_ids": [store.id]}):
        extra = {"rapid": {**named, "citations": True}}
        answer = client.chat.completions.create(**asked(extra_body=extra))
        texts.append(answer.choices[0].message.content)
        (citation, *_) = answer.model_extra["rapid"]["citations"]
        assert citation["document"] == "report.txt"
        start, end = citation["document_start"], citation["document_end"]
        assert DOCUMENT.text[start:end] == citation["quote"]
        assert citation["file_id"] == file.id
        line = 1 + DOCUMENT.text.count("\n", 0, start)
        assert citation["lines"][0] == line
    assert texts == [FACT.answer, FACT.answer]
    client.files.delete(file.id)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**asked(extra_body={"rapid": {"file_ids": [file.id]}}))


def test_a_stream_brings_the_same_text_and_its_receipt(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**asked(n=2))
    chunks = list(
        client.chat.completions.create(
            **asked(n=2), stream=True, stream_options={"include_usage": True}
        )
    )
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    finished = [c for c in chunks if any(choice.finish_reason for choice in c.choices)]
    assert finished[-1].model_extra["rapid"]["contract"] == "fused"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_second_question_finds_the_document_read(client: openai.OpenAI) -> None:
    client.chat.completions.create(**asked())
    other = next(each for each in DOCUMENT.questions if each.question != FACT.question)
    messages = [{"role": "user", "content": other.question}]
    usage = client.chat.completions.create(**asked(messages=messages)).usage
    assert usage.prompt_tokens_details.cached_tokens > 0.9 * usage.prompt_tokens


def test_a_stop_ends_the_text_before_it(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**asked(stop=" is"))
    assert answer.choices[0].message.content == FACT.answer.partition(" is")[0]
    assert answer.choices[0].finish_reason == "stop"


def test_what_is_wrong_is_named_and_nothing_stays_held(
    client: openai.OpenAI, application: str
) -> None:
    for wrong, param in [
        ({"model": "gpt-4"}, "model"),
        ({"temperature": 3}, "temperature"),
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"extra_body": {"rapid": {"etta": 1}}}, "rapid.etta"),
    ]:
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as refused:
            client.chat.completions.create(**asked(**wrong))
        assert refused.value.param == param
    long = generate_document(1, 6000).text
    with pytest.raises(openai.BadRequestError, match=r"mode: rag") as refused:
        client.chat.completions.create(
            **asked(extra_body={"rapid": {"documents": [{"name": "long", "text": long}]}})
        )
    assert refused.value.code == "context_length_exceeded"

    def seen() -> tuple[set[str], list[dict[str, Any]]]:
        ready = httpx.get(f"{application}/ready", timeout=10).json()
        engines = [engine for engine in ready["engines"] if engine["status"] == "ok"]
        return set(ready["pools"]), engines

    def is_idle() -> bool:  # in what was seen a second or so ago
        _, engines = seen()
        held = [engine["leases_open"] + engine["kv_pages_in_use"] for engine in engines]
        return len(held) > 1 and not any(held)

    wait_until(is_idle, 10, 0.2)
    pools, engines = seen()
    assert pools == {"ingress", "librarian", "orchestrator", "drafter", "target", "retriever"}
    assert {engine["pool"] for engine in engines} == {"drafter", "target"}
    assert all(engine["kv_pages_total"] > 0 for engine in engines)
