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
_NO_NAMED_HEAD = re.compile(r"(?![\w-]*+\s*+(\[[A-Z_]*+(\]\w*+)?)*+\s*+$)")
MOST_HEAD = 300  # characters of what comes before a call's arguments: a tool's name has 64
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

    What only looks like a call is text. White space before calls belongs to neither; behind them it
    is of the text that follows. What is returned in all depends on the text only, not on how it is
    split into pushes.

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
        self._num_scanned = 0
        self._begin_scan()
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
        """Take the beginning of a call, up to its arguments, or one whose keys are in disorder."""
        form, held = self._form, self._held
        if form.first and not self._name:  # the bracket of a list
            held = held.lstrip().removeprefix("[")
        head = held[:MOST_HEAD]  # so that what is held is read but once, however long it grows
        match = (_NAMED_HEAD if "[ARGS]" in form.head else _HEAD).match(head)
        if match and match[1] in self._names:
            yield from self._begin(match[1])
            self._held, self._step = held[match.end() :], self._take_arguments
            return
        begun = head.lstrip()
        is_long = len(held) >= MOST_HEAD
        if not begun and not is_long:
            return
        first_key = _FIRST_KEY.match(head)
        if "[ARGS]" in form.head:
            is_none = is_long or _NO_NAMED_HEAD.match(begun) is not None
        elif first_key is None:
            is_none = is_long or begun[0] != "{"
        else:
            is_none = first_key[1] not in _KEYS
        if is_none or match is not None:
            yield from self._give_up()
        elif begun[0] == "{":
            yield from self._take_whole_call(held)

    def _take_whole_call(self, held: str) -> Iterator[str | CallPiece]:
        """Take a call that is told when its last bracket has come."""
        end = self._find_end(held, self._num_scanned)
        self._num_scanned = len(held)
        if end is None:
            return
        call = _as_call(_read_object(held[:end]))
        if call is None or call[0] not in self._names:
            yield from self._give_up()
            return
        yield from self._begin(call[0])
        yield CallPiece(self.num_calls - 1, call[0], call[1])
        self._held, self._step = held[end:], self._take_tail
        self._tail = self._form.tail.split()[1:]

    def _begin(self, name: str) -> Iterator[CallPiece]:
        self._before, self._name = "", name
        self._begin_scan()
        self.num_calls += 1
        yield CallPiece(self.num_calls - 1, name, "", begins=True)

    def _give_up(self) -> Iterator[str]:
        if self._before:
            yield self._before
        self._before = ""
        self._begin_scan()
        self._step = self._take_text if self._form.opening else self._take_rest

    def _take_arguments(self) -> Iterator[str | CallPiece]:
        end = self._find_end(self._held, 0)
        taken = self._held[:end]
        if taken:
            yield CallPiece(self.num_calls - 1, self._name, taken)
        self._held = self._held[len(taken) :]
        if end is not None:
            self._step, self._tail = self._take_tail, self._form.tail.split()

    def _begin_scan(self) -> None:
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self._num_scanned = 0  # characters of a call whose end is looked for

    def _find_end(self, text: str, first: int) -> int | None:
        """Return where the object ends that is begun in a text, looking on from a place of it."""
        for at in range(first, len(text)):
            character = text[at]
            if self._in_string:
                self._in_string = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
            elif character == '"':
                self._in_string = True
            elif character in "{[}]":
                self._depth += 1 if character in "{[" else -1
                if not self._depth:
                    return at + 1
        return None

    def _take_tail(self) -> Iterator[str | CallPiece]:
        """Take what ends a call, as far as it is there, and what leads to the next one."""
        begun = self._held.lstrip()
        while self._tail and begun.startswith(self._tail[0]):
            self._held = begun.removeprefix(self._tail.pop(0))
            begun = self._held.lstrip()
        if not begun or (self._tail and self._tail[0].startswith(begun)):
            return
        self._tail = []
        separator = self._form.between.strip()
        if separator and begun[0] == separator[0] and separator != self._form.opening:
            self._before = self._held.removesuffix(begun[1:])
            self._held = begun[1:]
            self._step = self._take_call
            return
        if self._form.end and begun.startswith(self._form.end):
            self._held = begun.removeprefix(self._form.end)
        self._step = self._take_text if self._form.opening else self._take_rest
        yield from ()


def _read_object(text: str) -> Any:
    """Return what a text of JSON means; None if it is none, or nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
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
