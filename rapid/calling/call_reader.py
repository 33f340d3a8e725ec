"""The reading of calls in the text of an answer, while it grows."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from rapid.calling.call_forms import PYTHON_TAG, CallForm

_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NAMED_HEAD = re.compile(r"\s*([\w-]+)\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")
_FIRST_KEY = re.compile(r'\s*\{\s*"([^"\\]*)"')
_KEYS = {"name", "arguments", "parameters", "type", "function", "id"}  # a call may begin with one


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a call: its tool's name, with which it begins, or a part of its arguments.

    Attributes:
        index: Number of the call in the answer, from 0.
    """

    index: int
    name: str
    arguments: str
    begins: bool = False


class CallReader:
    """A reader that takes an answer's text and returns its calls, and the text beside them.

    What only looks like a call is text. White space around calls belongs to neither. What is
    returned in all depends on the text only, not on how it is split into pushes.

    Attributes:
        num_calls: Number of calls that have begun.
    """

    def __init__(self, form: CallForm, names: Collection[str]) -> None:
        """Store the form of the calls and the names of the tools that may be called."""
        self.num_calls = 0
        self._form, self._names = form, names
        self._held = ""  # what is not decided
        self._before = ""  # what came before it, and is text if no call follows
        self._name = ""
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self._step = self._take_text if form.opening else self._take_start
        self._tail: list[str] = []

    @property
    def has_whole_calls(self) -> bool:
        """Whether there are calls, and the last one has all of its arguments."""
        return self.num_calls > 0 and self._step != self._take_arguments

    def push(self, text: str) -> Iterator[str | CallPiece]:
        """Take the next text, and yield what is certain now, in order."""
        self._held += text
        while True:
            step, held = self._step, self._held
            yield from step()
            if (self._step, self._held) == (step, held):
                return

    def finish(self) -> Iterator[str | CallPiece]:
        """Yield what was held back."""
        rest = self._before + self._held
        is_of_call = self._step == self._take_tail or (self.num_calls and not rest.strip())
        if rest and not is_of_call:
            yield rest
        self._held = self._before = ""

    def _take_text(self) -> Iterator[str | CallPiece]:
        opening = self._form.opening
        at = self._held.find(opening)
        if at >= 0:
            text = self._held[:at].rstrip()
            self._before = self._held[len(text) : at + len(opening)]
            self._held = self._held[at + len(opening) :]
            self._step = self._take_call
        else:
            most = min(len(self._held), len(opening) - 1)
            ends = (n for n in range(most, 0, -1) if opening.startswith(self._held[-n:]))
            text = self._held[: len(self._held) - next(ends, 0)].rstrip()
            self._held = self._held[len(text) :]
        if text:
            yield text

    def _take_start(self) -> Iterator[str | CallPiece]:
        """Take the beginning of an answer that is either a call or a text."""
        begun = self._held.lstrip()
        if PYTHON_TAG.startswith(begun[: len(PYTHON_TAG)]) and len(begun) < len(PYTHON_TAG):
            return
        call = begun.removeprefix(PYTHON_TAG)
        if call != begun and not call.strip():
            return
        if call.lstrip().startswith("{"):
            self._before, self._held = self._held[: len(self._held) - len(call)], call
            self._step = self._take_call
        else:
            self._step = self._take_rest
        yield from ()

    def _take_rest(self) -> Iterator[str | CallPiece]:
        if self._held:
            yield self._held
        self._held = ""

    def _take_call(self) -> Iterator[str | CallPiece]:
        """Take the beginning of a call, up to its arguments."""
        form, held = self._form, self._held
        if form.first and not self._name:  # the bracket of a list
            held = held.lstrip().removeprefix("[")
        match = (_NAMED_HEAD if "[ARGS]" in form.head else _HEAD).match(held)
        if match and match[1] in self._names:
            yield from self._begin(match[1])
            self._held, self._step = held[match.end() :], self._take_arguments
            return
        begun = held.lstrip()
        first_key = _FIRST_KEY.match(held)
        if not begun:
            return
        if "[ARGS]" in form.head:
            is_none = not re.match(r"[\w-]*\s*(\[[A-Z_]*\]?\w*)*$", begun)
        else:
            is_none = begun[0] != "{" or (first_key is not None and first_key[1] not in _KEYS)
        is_none = is_none or match is not None
        whole = None if is_none or begun[0] != "{" else _read_object(begun)
        if whole is not None:
            value, length = whole
            if (call := _as_call(value)) is not None and call[0] in self._names:
                yield from self._begin(call[0])
                yield CallPiece(self.num_calls - 1, call[0], call[1])
                self._held, self._step = begun[length:], self._take_tail
                self._tail = self._form.tail.split()[1:]
                return
            is_none = True
        if is_none:
            yield from self._give_up()

    def _begin(self, name: str) -> Iterator[CallPiece]:
        self._before, self._name = "", name
        self.num_calls += 1
        yield CallPiece(self.num_calls - 1, name, "", begins=True)

    def _give_up(self) -> Iterator[str]:
        if self._before:
            yield self._before
        self._before = ""
        self._step = self._take_text if self._form.opening else self._take_rest

    def _take_arguments(self) -> Iterator[str | CallPiece]:
        for at, character in enumerate(self._held):
            if self._in_string:
                self._in_string = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
            elif character == '"':
                self._in_string = True
            else:
                self._depth += (character in "{[") - (character in "}]")
                if not self._depth:
                    yield CallPiece(self.num_calls - 1, self._name, self._held[: at + 1])
                    self._held, self._step = self._held[at + 1 :], self._take_tail
                    self._tail = self._form.tail.split()
                    return
        if self._held:
            yield CallPiece(self.num_calls - 1, self._name, self._held)
        self._held = ""

    def _take_tail(self) -> Iterator[str | CallPiece]:
        """Take what ends a call, as far as it is there, and what leads to the next one."""
        begun = self._held.lstrip()
        while self._tail and begun.startswith(self._tail[0]):
            begun = begun.removeprefix(self._tail.pop(0)).lstrip()
            self._held = begun
        if not begun or (self._tail and self._tail[0].startswith(begun)):
            return
        self._tail = []
        separator = self._form.between.strip()
        if separator and begun[0] == separator[0] and separator != self._form.opening:
            self._before, self._held = begun[0], begun[1:]
            self._step = self._take_call
            return
        if self._form.end:
            self._held = begun.removeprefix(self._form.end)
        self._step = self._take_text if self._form.opening else self._take_rest
        yield from ()


def _read_object(text: str) -> tuple[Any, int] | None:
    """Return the JSON object that a text begins with, and its length; None if it has no end."""
    try:
        return json.JSONDecoder().raw_decode(text)
    except ValueError:
        return None


def _as_call(value: Any) -> tuple[str, str] | None:
    """Return the name and the arguments of a call whose keys are in another order."""
    value = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, dict):
        return name, json.dumps(arguments, ensure_ascii=False)
    return (name, arguments) if isinstance(arguments, str) else None
