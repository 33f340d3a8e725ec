"""What a request has compiled is compiled beside the event loop, in every dialect."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from deployments.api.dialects.chat.chat_dialect import ChatDialect
from deployments.api.dialects.completions.completion_dialect import CompletionDialect
from deployments.api.dialects.messages.messages_dialect import MessagesDialect
from deployments.api.dialects.responses.responses_dialect import ResponsesDialect
from deployments.config.api_config import ApiConfig
from rapid.constraints import structured_outputs

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TURNS = [{"role": "user", "content": "Hi"}]
FUNCTION = {"name": "f", "parameters": SCHEMA, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}


@pytest.mark.parametrize(
    ("dialect", "fields"),
    [
        (ChatDialect(), {"messages": TURNS, "tools": [TOOL]}),
        (ChatDialect(), {"messages": TURNS, "guided_json": SCHEMA}),
        (CompletionDialect(), {"prompt": "a", "structured_outputs": {"json": SCHEMA}}),
        (
            MessagesDialect(),
            {
                "messages": TURNS,
                "max_tokens": 9,
                "tools": [{"name": "f", "input_schema": SCHEMA}],
                "tool_choice": {"type": "any"},
            },
        ),
        (ResponsesDialect(None), {"input": "Hi", "tools": [{"type": "function", **FUNCTION}]}),
    ],
    ids=lambda given: type(given).__name__,
)
async def test_no_grammar_is_checked_on_the_loop(
    dialect: Any, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = list[int]()
    monkeypatch.setattr(
        structured_outputs, "find_fault", lambda _: threads.append(threading.get_ident()) or ""
    )
    body = json.dumps({"model": "m"} | fields).encode()
    await dialect.parse(body, ApiConfig(model="m"), "r", "t")
    assert threads
    assert threading.get_ident() not in threads
