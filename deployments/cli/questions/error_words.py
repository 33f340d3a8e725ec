"""The server's refusals in the words of who asks: options and files instead of request fields."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from deployments.cli.server.server_client import tell_of_key

Asker = Literal["option", "command"]
"""Where a person asks: with options of ``rapid ask``, or commands of ``rapid chat``."""

# What a field of a request is called: as an option, and in a conversation.
_FIELDS: Mapping[str, tuple[str, str]] = {
    "rapid.mode": ("--mode", "/mode"),
    "rapid.eta": ("--eta", "--eta"),
    "rapid.transfer": ("--transfer", "--transfer"),
    "rapid.max_draft": ("--max-draft", "--max-draft"),
    "rapid.retrieval_tokens": ("--retrieval-tokens", "--retrieval-tokens"),
    "rapid.file_ids": ("--file", "--file"),
    "rapid.documents": ("--document", "/add"),
    "max_completion_tokens": ("--max-tokens", "--max-tokens"),
    "max_tokens": ("--max-tokens", "--max-tokens"),
    "temperature": ("--temperature", "--temperature"),
    "top_p": ("--top-p", "--top-p"),
    "seed": ("--seed", "--seed"),
}
_PHRASES: Mapping[str, tuple[str, str]] = {
    "`mode: rag`": ("`--mode rag`", "`/mode rag`"),
    "`too_long: sections`": ("`--sections`", "`--sections`"),
}
_DOCUMENT = re.compile(r"\brapid\.documents\[([0-9]+)\](?:\.text|\.name)?")
_MESSAGE = re.compile(r"\bmessages\[[0-9]+\](?:\.content)?")
_ANY_FIELD = re.compile(
    r"(?<![\w.`-])(" + "|".join(re.escape(name) for name in _FIELDS) + r")(?![\w-])"
)
_TOO_LONG = re.compile(
    r"prompt has (?P<has>\d+) tokens and the answer needs room for (?P<answer>\d+): that is "
    r"\d+ more than the (?P<whose>\w+)'s context of (?P<most>\d+)"
)
_ANSWER_TOO_LONG = re.compile(
    r"an answer of (?P<answer>\d+) tokens is longer than the (?P<whose>\w+)'s context of "
    r"(?P<most>\d+)"
)
_MUCH_TOO_LONG = re.compile(r"prompt has more than the (?P<most>\d+) tokens of the target's")


def is_of_option(error: Mapping[str, Any]) -> bool:
    """Return whether a refusal is of an option's value, and not of how long all is together."""
    param = error.get("param")
    is_value = param in _FIELDS and param not in ("rapid.documents", "rapid.file_ids")
    return is_value and error.get("code") != "context_length_exceeded"


def advise(
    error: Mapping[str, Any], names: Sequence[str], num_chars: int = 0, asker: Asker = "option"
) -> str:
    """Return the message of a refusal as somebody who types reads it.

    Args:
        error: The object ``error`` of a response.
        names: The names of the documents, in their order.
        num_chars: Characters that were sent.
        asker: How the question was asked.
    """
    message = str(error["message"])
    if told := tell_of_key(message) or _tell_what_fits(message, num_chars, asker):
        return told
    at = 0 if asker == "option" else 1
    for phrase, said in _PHRASES.items():
        message = message.replace(phrase, said[at])

    def name_document(found: re.Match[str]) -> str:
        index = int(found[1])
        named = names[index] if index < len(names) else found[1]
        return f"{_FIELDS['rapid.documents'][at]} {named}"

    message = _DOCUMENT.sub(name_document, message)
    message = _MESSAGE.sub("the question", message)
    message = _ANY_FIELD.sub(lambda found: _FIELDS[found[1]][at], message)
    return f"{message} Asking again may help." if error.get("retryable") else message


def _tell_what_fits(message: str, num_chars: int, asker: Asker) -> str | None:
    """Return what fits, and how to ask all the same, where prompt or answer are too long."""
    if cut := _ANSWER_TOO_LONG.search(message):
        return (
            f"--max-tokens {cut['answer']} is more than the {cut['whose']} can read and write, "
            f"{int(cut['most']):,} tokens with the documents and the question: give less"
        )
    exact = _TOO_LONG.search(message)
    rough = _MUCH_TOO_LONG.search(message)
    if exact and exact["whose"] == "target":
        has, most = int(exact["has"]), int(exact["most"])
        answer = int(exact["answer"])
        size = f"{has:,} tokens" + f", with an answer of up to {answer:,} more" * (answer > 1)
        fitting = num_chars * most // has
    elif rough:
        most, size, fitting = int(rough["most"]), "more than that", 0
    else:
        return None
    of_it = f", about {fitting:,} of these {num_chars:,} characters" if fitting else ""
    mode = "--mode rag" if asker == "option" else "/mode rag"
    sections = (
        "--sections (the target reads the passages that fit)"
        if asker == "option"
        else "begin again with --sections (the target reads the passages that fit)"
    )
    return (
        f"the documents and the question are too long for the target: it reads {most:,} tokens"
        f"{of_it}, and these are {size}. Ask with {mode} (the drafter reads what retrieval finds), "
        f"with {sections}, or about fewer documents"
    )
