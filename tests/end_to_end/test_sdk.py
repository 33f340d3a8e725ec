"""The unmodified OpenAI SDK against the real application."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import anthropic
import httpx
import openai
import pytest
from openai.types.responses import ResponseIncompleteEvent
from pydantic import BaseModel, Field

from rapid.embedded.generator import generate_document
from tests.ray_cluster import wait_until

pytestmark = pytest.mark.ray

DOCUMENT = generate_document(7, 1000)
# Another text than that of the requests which carry it, whose KV would be deleted with the file's.
STORED = f"{DOCUMENT.text}\n\nThis copy is stored."
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


class Banner(BaseModel):
    what: str = Field(max_length=40)
    kind: Literal["banner", "town"]


@pytest.mark.parametrize("mode", ["plain", "lossless", "fused", "rag"])
def test_an_answer_is_parsed_into_the_callers_model(client: openai.OpenAI, mode: str) -> None:
    documents = asked()["extra_body"]["rapid"]["documents"]
    body = {"rapid": {"documents": documents, "mode": mode}}
    answer = client.chat.completions.parse(
        **asked(response_format=Banner, extra_body=body, max_tokens=60)
    )
    told = answer.choices[0].message.parsed
    assert isinstance(told, Banner)
    assert answer.choices[0].message.content == told.model_dump_json()


def test_a_file_is_kept_indexed_asked_about_and_deleted(
    client: openai.OpenAI, application: str
) -> None:
    # Those that came for the load of other tests leave, and with them what they have read.
    wait_until(lambda: count_targets(application) == 1, 60, 0.2)
    file = client.files.create(file=("report.txt", STORED.encode()), purpose="user_data")
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
    certificate = delete_wholly(client, file.id)
    removed = {each["place"].partition(" ")[0]: 0 for each in certificate["searched"]}
    for each in certificate["searched"]:
        removed[each["place"].partition(" ")[0]] += each["removed"]
    assert removed["files"] == 3
    assert removed["target"] > 0
    assert removed["drafter"] > 0
    assert removed["orchestrator"] >= 1  # one that came for the load may have been asked as well
    assert removed["retriever:"] >= 1  # of all documents with this text
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**asked(extra_body={"rapid": {"file_ids": [file.id]}}))


def test_a_response_searches_a_file_is_kept_and_goes_on(client: openai.OpenAI) -> None:
    text = f"{DOCUMENT.text}\n\nThis copy is searched."
    file = client.files.create(file=("searched.txt", text.encode()), purpose="user_data")
    wait_until(lambda: client.files.retrieve(file.id).status == "processed", 60)
    static: Any = {"max_chunk_size_tokens": 32, "chunk_overlap_tokens": 16}
    store = client.vector_stores.create(
        file_ids=[file.id], chunking_strategy={"type": "static", "static": static}
    )
    wait_until(lambda: client.vector_stores.retrieve(store.id).status == "completed", 60)
    fields: Any = {"model": "rapid-embedded", "temperature": 0, "max_output_tokens": 40}
    tools: Any = [{"type": "file_search", "vector_store_ids": [store.id]}]
    with client.responses.stream(
        input=FACT.question,
        tools=tools,
        include=["file_search_call.results"],
        extra_body={"rapid": {"citations": True}},
        **fields,
    ) as stream:
        told = [event.type for event in stream]
        answer = stream.get_final_response()
    assert answer.output_text == FACT.answer
    search, message = answer.output
    assert any(FACT.answer.split()[-1] in each.text for each in search.results)
    assert {each.file_id for each in search.results} == {file.id}
    spans = sorted((text.index(each.text), len(each.text)) for each in search.results)
    assert len(spans) > 1
    assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(spans))
    assert {each.file_id for each in message.content[0].annotations} == {file.id}
    again = client.responses.retrieve(answer.id, stream=True)
    assert [event.type for event in again] == told
    other = next(each for each in DOCUMENT.questions if each.question != FACT.question)
    following = client.responses.create(
        input=other.question, previous_response_id=answer.id, **fields
    )
    assert following.usage.input_tokens_details.cached_tokens > 0.8 * following.usage.input_tokens
    certificate = delete_wholly(client, file.id)
    removed = {each["place"]: each["removed"] for each in certificate["searched"]}
    assert removed["responses"] == 2
    kept = client.responses.retrieve(answer.id)
    assert (kept.output_text, kept.output[0].results) == (FACT.answer, [])


def test_a_response_in_the_background_is_left_followed_and_another_cancelled(
    client: openai.OpenAI,
) -> None:
    documents = asked()["extra_body"]
    fields: Any = {"model": "rapid-embedded", "input": FACT.question, "temperature": 0}
    fields |= {"background": True, "extra_body": documents, "max_output_tokens": 40}
    made = client.responses.create(**fields)
    assert (made.status, made.output) == ("queued", [])
    wait_until(lambda: client.responses.retrieve(made.id).status == "completed", 60)
    assert client.responses.retrieve(made.id).output_text == FACT.answer
    with client.responses.create(**fields, stream=True) as stream:
        first, second = next(stream), next(stream)
    left = first.response.id
    rest = [*client.responses.retrieve(left, stream=True, starting_after=second.sequence_number)]
    numbers = [each.sequence_number for each in rest]
    assert numbers == [*range(second.sequence_number + 1, numbers[-1] + 1)]
    assert (rest[-1].type, rest[-1].response.output_text) == ("response.completed", FACT.answer)
    long = fields | {"extra_body": documents | {"min_tokens": 600}, "max_output_tokens": 600}
    endless = client.responses.create(**long)
    assert client.responses.cancel(endless.id).status == "cancelled"
    *_, last = client.responses.retrieve(endless.id, stream=True)
    assert isinstance(last, ResponseIncompleteEvent)
    assert last.response.status == client.responses.retrieve(endless.id).status == "cancelled"


def test_anthropics_sdk_is_answered_with_citations(application: str) -> None:
    client = anthropic.Anthropic(base_url=application, api_key="local", max_retries=0)
    source: Any = {"type": "text", "media_type": "text/plain", "data": DOCUMENT.text}
    document: Any = {"type": "document", "source": source, "citations": {"enabled": True}}
    content: Any = [document, {"type": "text", "text": FACT.question}]
    answer = client.messages.create(
        model="rapid-embedded",
        max_tokens=40,
        messages=[{"role": "user", "content": content}],
        extra_body={"temperature": 0},
    )
    assert "".join(each.text for each in answer.content) == FACT.answer
    (citation, *_) = next(each.citations for each in answer.content if each.citations)
    start, end = citation.start_char_index, citation.end_char_index
    assert DOCUMENT.text[start:end] == citation.cited_text


def count_targets(application: str) -> int:
    engines = httpx.get(f"{application}/ready", timeout=10).json()["engines"]
    return sum(engine["pool"] == "target" for engine in engines)


def delete_wholly(client: openai.OpenAI, file_id: str) -> dict[str, Any]:
    """Delete a file, and ask again until nothing is left of it; return the certificate."""
    found: list[dict[str, Any]] = []

    def is_gone() -> bool:
        found.append(client.files.delete(file_id).model_extra["rapid"])
        return found[-1]["state"] == "gone"

    wait_until(is_gone, 60)
    return found[-1]


def test_a_file_that_was_read_in_advance_is_cached_at_its_first_question(
    client: openai.OpenAI,
) -> None:
    text = generate_document(8, 1000)
    file = client.files.create(
        file=("ahead.txt", text.text.encode()), purpose="user_data", extra_body={"prefill": True}
    )

    def prefill() -> str:
        return client.files.retrieve(file.id).model_extra["rapid"]["prefill"]

    wait_until(lambda: prefill() != "queued", 60)
    assert prefill() == "done"
    cached = []
    for question in ("What is the banner of X?", "Who?"):
        messages = [{"role": "user", "content": question}]
        extra = {"rapid": {"file_ids": [file.id], "mode": "plain"}}
        usage = client.chat.completions.create(**asked(messages=messages, extra_body=extra)).usage
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == cached[1] > 0.9 * usage.prompt_tokens
    delete_wholly(client, file.id)
    extra = {"rapid": {"documents": [{"name": "ahead.txt", "text": text.text}], "mode": "plain"}}
    usage = client.chat.completions.create(**asked(extra_body=extra)).usage
    assert usage.prompt_tokens_details.cached_tokens < 0.1 * usage.prompt_tokens


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
        ({"presence_penalty": 3.0}, "presence_penalty"),
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


def test_a_text_is_continued_and_options_are_weighed(
    client: openai.OpenAI, application: str
) -> None:
    asked: dict[str, Any] = {"model": "rapid-embedded", "temperature": 0, "logprobs": 1}
    context = DOCUMENT.text[:600]
    prompts = [f"{context} {end}" for end in ("The mayor", "A harbor", "It rains")]
    body = {"model": "rapid-embedded", "prompt": prompts[0]}
    told = httpx.post(f"{application}/tokenize", json=body, timeout=30).json()
    assert told["max_model_len"] > told["count"] == len(told["tokens"])
    weighed = client.completions.create(prompt=prompts, echo=True, max_tokens=0, **asked)
    for choice, prompt in zip(weighed.choices, prompts, strict=True):
        assert choice.text == prompt
        assert choice.finish_reason == "length"
        assert choice.logprobs.token_logprobs[0] is None
        assert all(each <= 0 for each in choice.logprobs.token_logprobs[1:])
    assert len(weighed.choices[0].logprobs.tokens) == told["count"]
    answers = [
        client.completions.create(
            prompt=told["tokens"], max_tokens=8, extra_body={"rapid": {"mode": mode}}, **asked
        )
        for mode in ("plain", "lossless")
    ]
    assert answers[0].choices[0].text == answers[1].choices[0].text
    assert answers[1].model_extra["rapid"]["mode"] == "lossless"
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(prompt=[7] * 100_000, **asked)
    ranked = {"query": FACT.question, "documents": ["It rains.", DOCUMENT.text]}
    found = httpx.post(f"{application}/v1/rerank", json=ranked, timeout=30).json()
    assert [each["index"] for each in found["results"]] == [1, 0]
    with pytest.raises(openai.BadRequestError, match="no dense vectors"):
        client.embeddings.create(model="lexical", input="a")
    tokens = {"tokens": told["tokens"]}
    back = httpx.post(f"{application}/detokenize", json=tokens, timeout=30).json()
    assert back["prompt"].endswith(prompts[0])
