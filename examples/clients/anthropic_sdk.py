"""Anthropic's SDK: messages, streams, documents with citations."""

from __future__ import annotations

import anthropic
from tries import KEY, MODEL, QUESTION, URL, run

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=300)
ASK = [{"role": "user", "content": QUESTION}]


def message() -> None:
    answer = client.messages.create(model=MODEL, max_tokens=16, messages=ASK)
    assert answer.content[0].text


def stream() -> None:
    with client.messages.stream(model=MODEL, max_tokens=16, messages=ASK) as stream:
        assert "".join(stream.text_stream)


def document_with_citations() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "The code is 4711. " * 20}
    parts = [
        {"type": "document", "source": source, "citations": {"enabled": True}},
        {"type": "text", "text": QUESTION},
    ]
    messages = [{"role": "user", "content": parts}]
    assert client.messages.create(model=MODEL, max_tokens=16, messages=messages).content


run(message, stream, document_with_citations)
