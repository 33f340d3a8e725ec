"""What was said, summed up by the model, through OpenAI's SDK."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.responses.response_compact_params import ResponseCompactParams

from deployments.api.dialects.responses.body.input_items import seal, unseal
from deployments.api.dialects.responses.compacting import CompactRequest
from rapid.events import Finished, TextDelta
from tests.deployments.api.dialects.responses.test_responses_by_sdk import THOUGHT, serve
from tests.deployments.api.files.test_files_by_sdk import World, world  # pytest.mark.slow
from tests.deployments.scripted import STARTED, receipt

__all__ = ["world"]

SAID: Any = [
    {"role": "user", "content": "We launch on Tuesday."},
    {"role": "assistant", "content": "Understood.", "phase": "final_answer"},
]


async def test_what_was_said_is_summed_up_and_gone_on_from():
    client, service = serve()
    compacted = await client.responses.compact(
        model="m", input=SAID, instructions="Be brief.", prompt_cache_key="k", service_tier="auto"
    )
    assert (compacted.object, compacted.id[:5]) == ("response.compaction", "resp_")
    assert compacted.usage.total_tokens == 108
    kept, summary = compacted.output
    assert (kept.type, kept.content[0].text) == ("message", "We launch on Tuesday.")  # type: ignore[union-attr]
    assert (summary.type, summary.id[:4]) == ("compaction", "cmp_")  # type: ignore[union-attr,index]
    # The SDK takes every message of an output for an assistant's.
    said: Any = [each.to_dict(warnings=False) for each in compacted.output]
    await client.responses.create(model="m", input=[*said, {"role": "user", "content": "When?"}])
    first, then = ([(each.role, each.text) for each in sent.messages] for sent in service.requests)
    assert first[:3] == [
        ("system", "Be brief."),
        ("user", "We launch on Tuesday."),
        ("assistant", "Understood."),
    ]
    assert first[3][1].startswith("Sum up what was said")
    assert service.requests[0].temperature == 0
    assert then == [
        ("user", "We launch on Tuesday."),
        ("assistant", "What was said so far, in short: Hello, wörld!"),
        ("user", "When?"),
    ]


async def test_a_summary_has_no_thinking_in_it():
    client, _ = serve(*THOUGHT)
    compacted = await client.responses.compact(model="m", input=SAID)
    assert unseal(compacted.output[-1].encrypted_content) == "Yes"  # type: ignore[union-attr]


async def test_a_summary_that_is_cut_takes_the_place_of_nothing():
    client, _ = serve(STARTED, TextDelta(0, "We lau", (), "length"), Finished(receipt()))
    with pytest.raises(openai.BadRequestError, match="does not end within 8 tokens") as refused:
        await client.responses.compact(model="m", input=SAID)
    assert (refused.value.param, refused.value.code) == ("input", "max_output_tokens")


async def test_kept_responses_are_summed_up_without_their_documents(world: World):
    client = world.client()
    store = await client.vector_stores.create(file_ids=[await world.upload()])
    await world.ingest()
    search: Any = {"type": "file_search", "vector_store_ids": [store.id]}
    first = await client.responses.create(model="m", input="First?", tools=[search])
    compacted = await client.responses.compact(model="m", previous_response_id=first.id)
    assert [each.type for each in compacted.output] == ["message", "compaction"]
    asked, summed = world.service.requests
    assert ([each.name for each in asked.documents], summed.documents) == (["doors.txt"], ())
    assert [each.text for each in summed.messages[:2]] == ["First?", "Hello, wörld!"]
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(compacted.id)
    with pytest.raises(openai.NotFoundError):
        await world.client("b").responses.compact(model="m", previous_response_id=first.id)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "Hi", "model": None}, "model"),
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": "Hi", "stream": True}, "stream"),
        ({"input": "Hi", "service_tier": "flex"}, "service_tier"),
        ({"input": "Hi", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"type": "compaction"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "compaction", "encrypted_content": "a"}]}, "encrypted_content"),
        ({"input": [{"type": "compaction", "encrypted_content": "rapid1.*"}]}, "encrypted_content"),
        ({"input": [{"type": "compaction", "encrypted_content": "rapid1._w=="}]}, "encrypted"),
        ({"input": [{"role": "assistant", "content": "a", "phase": "x"}]}, "input[0].phase"),
    ],
)
async def test_what_cannot_be_summed_up_is_refused_by_its_name(body: Any, param: str):
    client, service = serve()
    fields = {key: each for key, each in ({"model": "m"} | body).items() if each is not None}
    with pytest.raises(openai.BadRequestError) as refused:
        await client.post("/responses/compact", cast_to=object, body=fields)
    assert param in (refused.value.param or "")
    assert service.requests == []


def test_every_field_of_openais_sdk_is_known():
    refused = {"image"}
    assert ResponseCompactParams.__annotations__.keys() - refused <= set(
        CompactRequest.model_fields
    )


@pytest.mark.parametrize("text", ["", "Ünïcode\n" * 99])
def test_a_sealed_text_comes_back(text: str):
    assert unseal(seal(text)) == text
