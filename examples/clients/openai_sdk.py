"""OpenAI's SDK: chat, forms, tools, responses, conversations, completions, files."""

from __future__ import annotations

import time

import openai
from tries import KEY, MODEL, QUESTION, URL, Light, light_of, run

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=300)
ASK = [{"role": "user", "content": QUESTION}]
TOOL = {
    "type": "function",
    "function": {
        "name": "light_of",
        "description": light_of.__doc__,
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["harbour", "bridge"]}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}
RESPONSES_TOOL = {"type": "function", **TOOL["function"], "strict": True}


def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=16)
    assert answer.choices[0].message.content


def chat_stream_with_usage() -> None:
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=ASK, max_tokens=16, stream=True, stream_options=options
        )
    )
    assert chunks[-1].usage.completion_tokens


def chat_choices_and_logprobs() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=8, n=3, logprobs=True, top_logprobs=2, temperature=1
    )
    assert len(answer.choices) == 3
    assert answer.choices[2].logprobs.content


def chat_parse() -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=ASK, max_tokens=100, response_format=Light
    )
    assert isinstance(answer.choices[0].message.parsed, Light)


def chat_json_object() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=16, response_format={"type": "json_object"}
    )
    assert answer.choices[0].message.content.startswith("{")  # a small model may not end it


def chat_tools() -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        max_tokens=100,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    message = answer.choices[0].message
    assert message.tool_calls[0].function.name == "light_of"
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "white"}
    after = client.chat.completions.create(
        model=MODEL,
        messages=[*ASK, message, result],
        max_tokens=16,
        tools=[TOOL],
        tool_choice="none",
    )
    assert after.choices[0].message.content


def chat_tools_stream() -> None:
    tools = [openai.pydantic_function_tool(Light)]
    with client.chat.completions.stream(
        model=MODEL,
        messages=ASK,
        max_tokens=100,
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
    ) as stream:
        answer = stream.get_final_completion()
    called = answer.choices[0].message.tool_calls[0].function
    assert isinstance(called.parsed_arguments, Light)


def completions() -> None:
    answer = client.completions.create(model=MODEL, prompt=["The code of", "A door"], max_tokens=8)
    assert len(answer.choices) == 2


def completions_of_a_prompt() -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The code of the door", max_tokens=0, echo=True, logprobs=1
    )
    assert answer.choices[0].logprobs.token_logprobs[0] is None


def responses() -> None:
    first = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=16)
    assert first.output_text
    second = client.responses.create(
        model=MODEL, input="And now?", previous_response_id=first.id, max_output_tokens=16
    )
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(first.id)


def responses_stream() -> None:
    with client.responses.stream(model=MODEL, input=QUESTION, max_output_tokens=16) as stream:
        types = [event.type for event in stream]
    assert (types[0], types[-1][:9]) == ("response.created", "response.")


def responses_in_the_background() -> None:
    made = client.responses.create(
        model=MODEL, input=QUESTION, max_output_tokens=16, background=True
    )
    *_, last = client.responses.retrieve(made.id, stream=True, starting_after=0)
    assert last.response.output_text == client.responses.retrieve(made.id).output_text
    assert client.responses.cancel(made.id).status == last.response.status  # it had ended


def responses_parse() -> None:
    answer = client.responses.parse(
        model=MODEL, input=QUESTION, max_output_tokens=100, text_format=Light
    )
    assert isinstance(answer.output_parsed, Light)


def responses_tools() -> None:
    answer = client.responses.create(
        model=MODEL,
        input=QUESTION,
        max_output_tokens=100,
        tools=[RESPONSES_TOOL],
        tool_choice="required",
    )
    assert answer.output[0].type == "function_call"


def responses_are_compacted() -> None:
    said = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "4711"}]
    compacted = client.responses.compact(model=MODEL, input=said)
    assert [each.type for each in compacted.output] == ["message", "compaction"]
    after = [*compacted.output, {"role": "user", "content": "And now?"}]
    assert client.responses.create(model=MODEL, input=after, max_output_tokens=16).output_text


def conversations() -> None:
    kept = client.conversations.create()
    client.responses.create(model=MODEL, input=QUESTION, conversation=kept.id, max_output_tokens=16)
    assert len(client.conversations.items.list(kept.id).data) == 2
    client.conversations.delete(kept.id)


def files_and_search() -> None:
    text = "The code of the harbour door is 4711. The bridge is closed in winter.\n" * 4
    file = client.files.create(file=("doors.txt", text.encode()), purpose="user_data")
    store = client.vector_stores.create(name="doors", file_ids=[file.id])
    until = time.monotonic() + 60
    while client.vector_stores.retrieve(store.id).file_counts.completed < 1:
        assert time.monotonic() < until, "the file is not read within a minute"
        time.sleep(0.2)
    answer = client.responses.create(
        model=MODEL,
        input=QUESTION,
        max_output_tokens=16,
        tools=[{"type": "file_search", "vector_store_ids": [store.id]}],
        include=["file_search_call.results"],
    )
    assert any(each.type == "file_search_call" for each in answer.output)
    client.vector_stores.delete(store.id)
    client.files.delete(file.id)


def models() -> None:
    assert [each.id for each in client.models.list()] == [MODEL]


run(
    chat,
    chat_stream_with_usage,
    chat_choices_and_logprobs,
    chat_parse,
    chat_json_object,
    chat_tools,
    chat_tools_stream,
    completions,
    completions_of_a_prompt,
    responses,
    responses_stream,
    responses_in_the_background,
    responses_parse,
    responses_tools,
    responses_are_compacted,
    conversations,
    files_and_search,
    models,
)
