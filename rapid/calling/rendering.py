"""Chats with tools as chat templates take them, and as those take them that know no tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import groupby, takewhile
from typing import Any

from rapid.calling.call_forms import HERMES, CallForm
from rapid.chat_messages import Message, Tool

# The wording of Hermes 2 Pro's and Qwen 2.5's templates, which many models were trained on.
_TOLD = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def as_turns(messages: Sequence[Message], form: CallForm) -> list[dict[str, Any]]:
    """Return a chat as templates of a form take it; arguments of calls are objects, not JSON.

    Those of a call that was cut are none, as some templates walk through them.
    """

    def id_of(given: str) -> str:
        short = blake2b(given.encode(), digest_size=5).hexdigest()[:9]
        return short if form.has_short_ids else given

    if form.is_in_channels:
        messages = _part_calls(messages)
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    turns = []
    for message in messages:
        turn: dict[str, Any] = {"role": message.role, "content": message.text}
        if message.tool_calls:
            turn["tool_calls"] = [
                {
                    "type": "function",
                    "id": id_of(call.id),
                    "function": {"name": call.name, "arguments": call.read_arguments()},
                }
                for call in message.tool_calls
            ]
        if message.thinking:
            turn["thinking" if form.is_in_channels else "reasoning_content"] = message.thinking
        if message.tool_call_id is not None:
            turn["tool_call_id"] = id_of(message.tool_call_id)
            turn["name"] = names.get(message.tool_call_id, "")
        turns.append(turn)
    return turns


def _part_calls(messages: Sequence[Message]) -> list[Message]:
    """Return a chat whose messages have one call each, before its result, and no text beside it.

    The template of gpt-oss takes no others; text before a call it writes as thinking.
    """
    chat = list[Message]()
    for index, message in enumerate(messages):
        if message.role == "tool":  # which came with its call
            continue
        if not message.tool_calls:
            chat.append(message)
            continue
        behind = takewhile(lambda each: each.role == "tool", messages[index + 1 :])
        results = {each.tool_call_id: each for each in behind}
        thought = "\n\n".join(filter(None, (message.thinking, message.text)))
        for call in message.tool_calls:
            chat.append(replace(message, content="", thinking=thought, tool_calls=(call,)))
            chat += [results[call.id]] if call.id in results else []
            thought = ""
    return chat


def as_plain_chat(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Return a chat without tools that says the same: in a system message, and in the turns.

    Results of the calls of one message are one message of the user.
    """
    chat = []
    for is_result, turns in groupby(messages, lambda each: each.role == "tool"):
        if is_result:
            results = (f"<tool_response>\n{each.text}\n</tool_response>" for each in turns)
            chat.append(Message("user", "\n".join(results)))
            continue
        for each in turns:
            if each.tool_calls:
                said = "\n".join(filter(None, (each.text, HERMES.write(each.tool_calls))))
                each = Message(each.role, said)
            chat.append(each)
    if tools:
        told = _TOLD.format(tools="\n".join(json.dumps(each.describe()) for each in tools))
        if chat and chat[0].role == "system":
            chat[0] = replace(chat[0], content=f"{chat[0].text}\n\n{told}")
        else:
            chat.insert(0, Message("system", told))
    return chat
