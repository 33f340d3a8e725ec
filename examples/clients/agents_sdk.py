"""OpenAI's Agents SDK, over responses, which is its default, and over chat completions."""

from __future__ import annotations

import asyncio

import agents
import openai
from tries import KEY, MODEL, QUESTION, URL, Light, light_of, run

agents.set_tracing_disabled(True)


def _connect() -> openai.AsyncOpenAI:
    """Return a client; each belongs to one event loop."""
    return openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=300)


def _over_responses() -> agents.Model:
    return agents.OpenAIResponsesModel(MODEL, _connect())


def _over_chat() -> agents.Model:
    return agents.OpenAIChatCompletionsModel(MODEL, _connect())


def _agent(model: object, **settings: object) -> agents.Agent:
    called = settings.pop("tool_choice", None)
    is_parallel = False if called else None  # a small model would call without end
    return agents.Agent(
        "Guide",
        model=model,
        model_settings=agents.ModelSettings(
            max_tokens=100, tool_choice=called, parallel_tool_calls=is_parallel
        ),
        **settings,
    )


def responses() -> None:
    assert agents.Runner.run_sync(_agent(_over_responses()), QUESTION).final_output


def responses_stream() -> None:
    async def ask() -> int:
        asked = agents.Runner.run_streamed(_agent(_over_responses()), QUESTION)
        return len([event async for event in asked.stream_events()])

    assert asyncio.run(ask()) > 5


def responses_output_type() -> None:
    done = agents.Runner.run_sync(_agent(_over_responses(), output_type=Light), QUESTION)
    assert isinstance(done.final_output, Light)


def responses_tool() -> None:
    tools = [agents.function_tool(light_of)]
    done = agents.Runner.run_sync(
        _agent(_over_responses(), tools=tools, tool_choice="required"), QUESTION
    )
    assert any(each.type == "tool_call_output_item" for each in done.new_items)


def chat_tool() -> None:
    tools = [agents.function_tool(light_of)]
    done = agents.Runner.run_sync(
        _agent(_over_chat(), tools=tools, tool_choice="required"), QUESTION
    )
    assert any(each.type == "tool_call_output_item" for each in done.new_items)


def chat_output_type() -> None:
    done = agents.Runner.run_sync(_agent(_over_chat(), output_type=Light), QUESTION)
    assert isinstance(done.final_output, Light)


run(
    responses,
    responses_stream,
    responses_output_type,
    responses_tool,
    chat_tool,
    chat_output_type,
)
