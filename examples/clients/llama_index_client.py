"""LlamaIndex: completions, chats, structured answers, embeddings."""

from __future__ import annotations

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from tries import EMBEDDER, KEY, MODEL, QUESTION, URL, Light, run

SETTINGS = {
    "model": MODEL,
    "api_base": f"{URL}/v1",
    "api_key": KEY,
    "max_tokens": 100,
    "max_retries": 0,
    "timeout": 300,
}
chats = OpenAILike(is_chat_model=True, is_function_calling_model=True, **SETTINGS)


def complete() -> None:
    assert OpenAILike(**SETTINGS).complete("The code of the door").text


def complete_by_chat() -> None:
    assert chats.complete(QUESTION).text


def chat() -> None:
    assert chats.chat([ChatMessage(role="user", content=QUESTION)]).message.content


def stream_chat() -> None:
    asked = chats.stream_chat([ChatMessage(role="user", content=QUESTION)])
    assert "".join(each.delta or "" for each in asked)


def parse() -> None:
    assert isinstance(chats.structured_predict(Light, PromptTemplate(QUESTION)), Light)


def embeddings() -> None:
    asked = OpenAILikeEmbedding(EMBEDDER, api_base=f"{URL}/v1", api_key=KEY, timeout=300)
    first, second = asked.get_text_embedding_batch([QUESTION, "Who built the bridge?"])
    assert len(first) == len(second) == len(asked.get_query_embedding(QUESTION))


run(complete, complete_by_chat, chat, stream_chat, parse, embeddings=embeddings)
