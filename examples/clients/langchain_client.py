"""LangChain and LangGraph: models, forms by each method, tools, an agent, overflow."""

from __future__ import annotations

from langchain.agents import create_agent
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from tries import EMBEDDER, KEY, MODEL, QUESTION, URL, Light, light_of, run

SETTINGS = {
    "base_url": f"{URL}/v1",
    "api_key": KEY,
    "model": MODEL,
    "max_retries": 0,
    "timeout": 300,
}
model = ChatOpenAI(max_tokens=100, **SETTINGS)


def invoke() -> None:
    assert model.invoke(QUESTION).content


def batch() -> None:
    assert len(model.batch([QUESTION, "Who built the bridge?"])) == 2


def stream() -> None:
    assert "".join(chunk.text for chunk in model.stream(QUESTION))


def parse_by_schema() -> None:
    assert isinstance(model.with_structured_output(Light).invoke(QUESTION), Light)


def parse_by_function() -> None:
    asked = model.with_structured_output(Light, method="function_calling")
    assert isinstance(asked.invoke(QUESTION), Light)


def tools() -> None:
    asked = model.bind_tools([light_of], tool_choice="any", parallel_tool_calls=False)
    called = asked.invoke(QUESTION)
    assert called.tool_calls[0]["name"] == "light_of"
    result = ToolMessage("white", tool_call_id=called.tool_calls[0]["id"])
    asked = model.bind_tools([light_of], tool_choice="none")
    assert asked.invoke([HumanMessage(QUESTION), called, result]).content


def agent() -> None:
    state = create_agent(model, [light_of]).invoke({"messages": [HumanMessage(QUESTION)]})
    assert state["messages"][-1].content


def responses() -> None:
    assert ChatOpenAI(use_responses_api=True, **SETTINGS).invoke(QUESTION).text


def completions() -> None:
    assert OpenAI(max_tokens=8, **SETTINGS).invoke("The code of the door")


def embeddings() -> None:
    # The default cuts texts into the tokens of OpenAI's own models, which no other server has.
    asked = OpenAIEmbeddings(check_embedding_ctx_length=False, **SETTINGS | {"model": EMBEDDER})
    first, second = asked.embed_documents([QUESTION, "Who built the bridge?"])
    assert len(first) == len(second) == len(asked.embed_query(QUESTION))


def overflow_is_recognised() -> None:
    try:
        model.invoke("word " * 30_000)
    except ContextOverflowError:
        return
    raise AssertionError("no ContextOverflowError")


run(
    invoke,
    batch,
    stream,
    parse_by_schema,
    parse_by_function,
    tools,
    agent,
    responses,
    completions,
    overflow_is_recognised,
    embeddings=embeddings,
)
