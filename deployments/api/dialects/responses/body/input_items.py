"""Items of a conversation: as they come, as they are kept, and as the messages of a chat."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deployments.api.dialects.renaming import read_text, refuse_field

Json = dict[str, Any]

_PHASES = ("commentary", "final_answer")  # of an assistant's message; a model is not told
_ROLES = ("user", "assistant", "system", "developer")
_SEAL = "rapid1."  # begins the content of a compaction, and tells its form
_TEXTS = ("input_text", "output_text", "text", "refusal")
_SILENT = ("file_search_call", "reasoning")  # which are no turns of a chat
_MOST_LEVELS = 100  # of lists and objects: far below where a walk through them fails
_UNTOLD = ("annotations", "content", "encrypted_content", "logprobs", "results", "summary")
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "compaction": "cmp",
}


def read_items(given: str | Sequence[Any], where: str = "input") -> list[Json]:
    """Return items in the one form in which they are kept.

    Args:
        given: A text, which is a message of the user, or items.
        where: The field's name.

    Raises:
        BadRequest: One is no item, or of a kind that is not supported; it is named.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_read_item(item, f"{where}[{index}]") for index, item in enumerate(given)]


def check_told(value: object, where: str) -> None:
    """Check that a value of a request can be written into an answer.

    Raises:
        BadRequest: It has what JSON or UTF-8 has not, or is nested deeply; the field is named.
    """
    if not _is_flat(value, _MOST_LEVELS):
        refuse_field(where, f"is nested in more than {_MOST_LEVELS} levels: send it flatter")
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        refuse_field(where, "has a lone surrogate (half of an escaped character): send whole ones")
    except ValueError:
        refuse_field(where, "has NaN or Infinity, which JSON has not: send a finite number or null")


def name_items(items: Iterable[Json], unique: str) -> list[Json]:
    """Return items with ids, where they have none, of which `unique` is a part."""
    return [
        {"id": f"{_PREFIXES.get(item['type'], 'item')}_{unique}_in{number}"} | item
        for number, item in enumerate(items)
    ]


def lighten(item: Json) -> Json:
    """Return a kept item without what a model is not told, which may be long."""
    if item["type"] in _SILENT:
        told = {"content"} if item["type"] == "reasoning" else set[str]()
        return {name: each for name, each in item.items() if name in told or name not in _UNTOLD}
    lists = {name: item[name] for name in ("content", "output") if name in item}
    return item | {
        name: [{key: each for key, each in part.items() if key not in _UNTOLD} for part in parts]
        for name, parts in lists.items()
    }


def count_characters(item: Json) -> int:
    """Return the characters that a model is told of an item."""
    if item["type"] in _SILENT:
        return len(_read_thoughts(item))
    parts = (*item.get("content", ()), *item.get("output", ()))
    texts = [part.get("text", part.get("refusal", "")) for part in parts]
    named = ("name", "arguments", "encrypted_content")
    return sum(map(len, texts)) + sum(len(item.get(each, "")) for each in named)


def as_messages(items: Iterable[Json]) -> list[tuple[int, Json]]:
    """Return the messages that items are in a chat, each with the place of its item."""
    messages: list[tuple[int, Json]] = []
    thoughts: Json = {}  # before the next message of the assistant
    for place, item in enumerate(items):
        kind = item["type"]
        if kind == "reasoning":
            thoughts = {"reasoning_content": _read_thoughts(item)}
        elif kind == "message":
            parts = [_as_part(part) for part in item["content"]]
            of_it = thoughts if item["role"] == "assistant" else {}
            messages.append((place, {"role": item["role"], "content": parts} | of_it))
            thoughts = {}
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            if not messages or messages[-1][1]["role"] != "assistant":
                messages.append((place, {"role": "assistant", "content": None} | thoughts))
                thoughts = {}
            messages[-1][1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            texts = [_as_part(part) for part in item["output"]]
            answer = {"role": "tool", "tool_call_id": item["call_id"], "content": texts}
            messages.append((place, answer))
        elif kind == "compaction":
            # The model's own words: as the system's, they could order what the system did not.
            said = f"What was said so far, in short: {unseal(item['encrypted_content'])}"
            messages.append((place, {"role": "assistant", "content": said}))
    return messages


def _read_thoughts(item: Json) -> str:
    """Return the text of an item of reasoning; what is no text of it is passed over."""
    parts = item.get("content")
    parts = parts if item["type"] == "reasoning" and isinstance(parts, list) else ()
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return "".join(each for each in texts if isinstance(each, str))


def seal(text: str) -> str:
    """Return a text as the content of a compaction, which hides nothing from who reads base64."""
    return _SEAL + base64.urlsafe_b64encode(text.encode()).decode()


def unseal(sealed: str) -> str:
    """Return the text of a compaction.

    Raises:
        ValueError: It is none that `seal` made.
    """
    if not sealed.startswith(_SEAL):
        raise ValueError("no compaction of this server")
    return base64.b64decode(sealed[len(_SEAL) :], b"-_", validate=True).decode()


def _as_part(part: Json) -> Json:
    if part["type"] == "input_file":
        return {"type": "file", "file": {"file_id": part["file_id"]}}
    return {"type": "text", "text": part.get("text", part.get("refusal"))}


def _read_item(item: object, where: str) -> Json:
    if not isinstance(item, Mapping):
        refuse_field(where, "must be an object")
    check_told(list(item), where)
    for name, value in item.items():
        check_told(value, f"{where}.{name}")
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        if item.get("role") not in _ROLES:
            refuse_field(f"{where}.role", f"must be one of {', '.join(map(repr, _ROLES))}")
        usual = "output_text" if item["role"] == "assistant" else "input_text"
        content = _read_parts(item.get("content"), usual, f"{where}.content")
        kept: Json = _keep_id(item, where) | {"type": "message", "role": item["role"]}
        if (phase := item.get("phase")) is not None:
            if phase not in _PHASES:
                refuse_field(f"{where}.phase", f"must be one of {', '.join(map(repr, _PHASES))}")
            kept["phase"] = phase
        return kept | {"status": "completed", "content": content}
    if kind in ("function_call", "function_call_output"):
        names = ("call_id", "name", "arguments") if kind == "function_call" else ("call_id",)
        kept = _keep_id(item, where) | {"type": kind, "status": "completed"}
        kept |= {name: read_text(item, name, where) for name in names}
        if kind == "function_call_output":
            kept["output"] = _read_parts(item.get("output"), "input_text", f"{where}.output")
        return kept
    if kind == "compaction":
        sealed = read_text(item, "encrypted_content", where)
        try:
            unseal(sealed)
        except ValueError:
            refuse_field(f"{where}.encrypted_content", "is not of /v1/responses/compact here")
        return _keep_id(item, where) | {"type": kind, "encrypted_content": sealed}
    if kind in _SILENT:
        return _keep_id(item, where) | {k: v for k, v in item.items() if k != "id"}
    known = "a message, function_call, function_call_output or compaction"
    refuse_field(f"{where}.type", f"{kind!r} is not supported: an item is {known}", "unsupported")


def _is_flat(value: object, most_levels: int) -> bool:
    if not isinstance(value, dict | list):
        return True
    within = value.values() if isinstance(value, dict) else value
    return most_levels > 0 and all(_is_flat(each, most_levels - 1) for each in within)


def _read_parts(content: object, usual: str, where: str) -> list[Json]:
    if isinstance(content, str):
        content = [{"type": usual, "text": content}]
    if not isinstance(content, list):
        refuse_field(where, "must be a string or a list of parts")
    parts = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _TEXTS:
            name = "refusal" if kind == "refusal" else "text"
            kept = {"type": kind, name: read_text(part, name, place)}
            if kind == "output_text":
                annotations = part.get("annotations")
                kept["annotations"] = annotations if isinstance(annotations, list) else []
            parts.append(kept)
        elif kind == "input_file":
            for name in ("file_data", "file_url"):
                if part.get(name) is not None:
                    advice = "upload it to /v1/files and send its file_id"
                    refuse_field(f"{place}.{name}", f"is not supported: {advice}", "unsupported")
            parts.append({"type": kind, "file_id": read_text(part, "file_id", place)})
        else:
            refuse_field(f"{place}.type", f"{kind!r} is not supported: send text", "unsupported")
    return parts


def _keep_id(item: Mapping[str, Any], where: str) -> Json:
    if item.get("id") is None:
        return {}
    given = read_text(item, "id", where)
    return {"id": given} if 0 < len(given) <= 128 else {}  # OpenAI's and ours are shorter
