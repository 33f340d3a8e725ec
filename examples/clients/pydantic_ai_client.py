"""pydantic-ai: text, history, streams, outputs by tool, schema and prompt, responses."""

from __future__ import annotations

import asyncio

import openai
from pydantic_ai import (
    Agent,
    NativeOutput,
    PromptedOutput,
    ToolOutput,
    UnexpectedModelBehavior,
    capture_run_messages,
)
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from tries import KEY, MODEL, QUESTION, URL, Light, run


def _provider() -> OpenAIProvider:
    """Return a provider; its client belongs to one event loop."""
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=300)
    return OpenAIProvider(openai_client=client)


def _over_chat() -> OpenAIChatModel:
    return OpenAIChatModel(MODEL, provider=_provider())


def _over_responses() -> OpenAIResponsesModel:
    return OpenAIResponsesModel(MODEL, provider=_provider())


SETTINGS = {"max_tokens": 100}


def text_and_history() -> None:
    agent = Agent(_over_chat(), model_settings=SETTINGS)
    first = agent.run_sync(QUESTION)
    assert agent.run_sync("And the other?", message_history=first.all_messages()).output


def stream() -> None:
    async def ask() -> str:
        async with Agent(_over_chat(), model_settings=SETTINGS).run_stream(QUESTION) as answer:
            return "".join([each async for each in answer.stream_text(delta=True)])

    assert asyncio.run(ask())


def output_by_tool() -> None:
    agent = Agent(_over_chat(), output_type=ToolOutput(Light), model_settings=SETTINGS)
    assert isinstance(agent.run_sync(QUESTION).output, Light)


def output_by_schema() -> None:
    agent = Agent(_over_chat(), output_type=NativeOutput(Light), model_settings=SETTINGS)
    assert isinstance(agent.run_sync(QUESTION).output, Light)


def output_by_prompt() -> None:
    agent = Agent(_over_chat(), output_type=PromptedOutput(Light), model_settings=SETTINGS)
    with capture_run_messages() as messages:
        try:
            assert isinstance(agent.run_sync(QUESTION).output, Light)
        except UnexpectedModelBehavior:  # the small models fill an object without end
            answers = [each for each in messages if each.kind == "response"]
            assert all(each.text.startswith("{") for each in answers)


def responses() -> None:
    agent = Agent(_over_responses(), model_settings=SETTINGS)
    assert agent.run_sync(QUESTION).output


def responses_output_by_tool() -> None:
    agent = Agent(_over_responses(), output_type=ToolOutput(Light), model_settings=SETTINGS)
    assert isinstance(agent.run_sync(QUESTION).output, Light)


def responses_output_by_schema() -> None:
    agent = Agent(_over_responses(), output_type=NativeOutput(Light), model_settings=SETTINGS)
    assert isinstance(agent.run_sync(QUESTION).output, Light)


run(
    text_and_history,
    stream,
    output_by_tool,
    output_by_schema,
    output_by_prompt,
    responses,
    responses_output_by_tool,
    responses_output_by_schema,
)
