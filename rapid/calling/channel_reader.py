"""The reading of calls in the channels of gpt-oss, while the answer grows."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from typing_extensions import override

from rapid.calling.call_forms import CallForm
from rapid.calling.call_reader import MOST_HEAD, CallPiece, CallReader

_MESSAGE, _END = "<|message|>", "<|end|>"
_BEGINNINGS = ("<|start|>", "<|channel|>", "to=functions.")
_BREAKS = (_END, *_BEGINNINGS[:2])  # what ends a message, or begins the next one without an end
_CALLED = re.compile(r"\bto=functions\.([\w-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class ChannelCallReader(CallReader):
    """A `CallReader` of an answer in messages, each with a head that names its channel.

    Calls are messages to a tool. Models name it before the channel or behind it. Messages to the
    user are one text, with a blank line between them; what is thought between them is dropped.
    """

    def __init__(self, form: CallForm, names: Collection[str]) -> None:
        """Store the form of the calls and the names of the tools that may be called."""
        super().__init__(form, names)
        self._has_said, self._joint = False, ""
        self._step = self._take_beginning

    @override
    def finish(self) -> Iterator[str | CallPiece]:
        """Yield what was held back, without the head of a message that is cut."""
        if self._step in (self._take_head, self._take_thoughts):
            self._held = ""
        yield from super().finish()

    def _take_beginning(self) -> Iterator[str | CallPiece]:
        begun = self._held.lstrip()
        if begun.startswith(_BEGINNINGS):
            self._step = self._take_head
        elif not any(each.startswith(begun) for each in _BEGINNINGS):
            self._step = self._take_words
        yield from ()

    def _take_head(self) -> Iterator[str | CallPiece]:
        head, found, rest = self._held.partition(_MESSAGE)
        called, channel = _CALLED.search(head), _CHANNEL.search(head)
        if not found:
            if len(head) > MOST_HEAD:
                yield from self._say(head[:-MOST_HEAD])
                self._held, self._step = head[-MOST_HEAD:], self._take_words
        elif called:
            if not rest.strip():
                return
            if called[1] in self._names and rest.lstrip()[0] == "{":
                yield from self._begin(called[1])
                self._held, self._step = rest.lstrip(), self._take_arguments
            else:  # it only looks like a call
                yield from self._say(head + found)
                self._held, self._step = rest, self._take_words
        else:
            is_thought = channel is not None and channel[1] == "analysis"
            self._held, self._joint = rest, "\n\n" * self._has_said
            self._step = self._take_thoughts if is_thought else self._take_words

    def _take_words(self) -> Iterator[str | CallPiece]:
        """Take what has come of a message to the user."""
        words = self._cut()
        if words:
            yield from self._say(words)

    def _take_thoughts(self) -> Iterator[str | CallPiece]:
        self._cut()
        yield from ()

    @override
    def _take_tail(self) -> Iterator[str | CallPiece]:
        if self._held.strip():
            self._held = self._held.lstrip().removeprefix(_END)
            self._step = self._take_beginning
        yield from ()

    def _say(self, words: str) -> Iterator[str]:
        joint, self._joint, self._has_said = self._joint, "", True
        yield joint + words

    def _cut(self) -> str:
        """Return what is certain to be of this message, and go on behind it if it has ended."""
        held = self._held
        places = [at for each in _BREAKS if (at := held.find(each)) >= 0]
        if places:
            self._held, self._step = held[min(places) :].removeprefix(_END), self._take_beginning
            return held[: min(places)].rstrip()
        most = min(len(held), max(map(len, _BREAKS)) - 1)
        ends = (n for n in range(most, 0, -1) if any(e.startswith(held[-n:]) for e in _BREAKS))
        certain = held[: len(held) - next(ends, 0)].rstrip()
        self._held = held[len(certain) :]
        return certain
