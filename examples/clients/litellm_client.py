"""litellm, as its providers `openai` and `hosted_vllm`."""

from __future__ import annotations

import litellm
from tries import EMBEDDER, KEY, MODEL, QUESTION, URL, Light, run

litellm.telemetry = False
ASK = [{"role": "user", "content": QUESTION}]
SERVER = {"api_base": f"{URL}/v1", "api_key": KEY, "max_retries": 0, "timeout": 300}
NAMES = (f"openai/{MODEL}", f"hosted_vllm/{MODEL}")
TOOL = {
    "type": "function",
    "function": {
        "name": "light_of",
        "parameters": {"type": "object", "properties": {"place": {"enum": ["harbour", "bridge"]}}},
    },
}


def completion() -> None:
    for name in NAMES:
        answer = litellm.completion(name, ASK, max_tokens=16, **SERVER)
        assert answer.choices[0].message.content


def stream() -> None:
    for name in NAMES:
        chunks = list(litellm.completion(name, ASK, max_tokens=16, stream=True, **SERVER))
        assert any(each.choices[0].delta.content for each in chunks)


def parse() -> None:
    for name in NAMES:
        answer = litellm.completion(name, ASK, max_tokens=100, response_format=Light, **SERVER)
        Light.model_validate_json(answer.choices[0].message.content)


def tools() -> None:
    for name in NAMES:
        answer = litellm.completion(
            name, ASK, max_tokens=100, tools=[TOOL], tool_choice="required", **SERVER
        )
        assert answer.choices[0].message.tool_calls[0].function.name == "light_of"


def text_completion() -> None:
    name = f"text-completion-openai/{MODEL}"
    assert litellm.text_completion("The code of", name, max_tokens=8, **SERVER).choices


def responses() -> None:
    answer = litellm.responses(QUESTION, f"openai/{MODEL}", max_output_tokens=16, **SERVER)
    assert answer.output


def embeddings() -> None:
    for provider in ("openai", "hosted_vllm"):
        found = litellm.embedding(
            f"{provider}/{EMBEDDER}", [QUESTION, "Who built the bridge?"], **SERVER
        )
        assert len(found.data) == 2


def overflow_is_recognised() -> None:
    for name in NAMES:
        try:
            litellm.completion(name, [{"role": "user", "content": "word " * 30_000}], **SERVER)
        except litellm.ContextWindowExceededError:
            continue
        raise AssertionError(f"{name}: no ContextWindowExceededError")


run(
    completion,
    stream,
    parse,
    tools,
    text_completion,
    responses,
    overflow_is_recognised,
    embeddings=embeddings,
)
