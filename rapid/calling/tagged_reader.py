"""The reading of calls whose arguments stand between tags, while the answer grows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from rapid.calling.call_forms import CallForm
from rapid.calling.call_reader import MOST_HEAD, CallPiece, CallReader
from rapid.calling.channel_reader import ChannelCallReader
from rapid.calling.tagged_arguments import ANY_KIND, ArgumentTags, find_kinds, read_value
from rapid.chat_messages import Tool

_TEXT = frozenset({"string"})


def open_reader(form: CallForm, tools: Sequence[Tool]) -> CallReader:
    """Return a reader of calls of some tools in a form."""
    if form.is_in_channels:
        return ChannelCallReader(form, [each.name for each in tools])
    if form.tags is None:
        return CallReader(form, [each.name for each in tools])
    return TaggedCallReader(form, form.tags, tools)


class TaggedCallReader(CallReader):
    """A `CallReader` that returns arguments as JSON, texts among them while they grow.

    Models leave out white space and closing tags at times; what is clear without them is read.
    """

    def __init__(self, form: CallForm, tags: ArgumentTags, tools: Sequence[Tool]) -> None:
        """Store the form of the calls and the tools that may be called."""
        super().__init__(form, [each.name for each in tools])
        self._kinds_of = {each.name: find_kinds(each.parameters) for each in tools}
        self._kinds, self._num_arguments = ANY_KIND, 0
        self._closing, self._padding = tags.closing, tags.padding
        self._ends = form.tail.split()
        self._head_opening, behind = map(str.strip, form.head.split("%s"))
        self._head = re.compile(
            rf"\s*{re.escape(self._head_opening)}\s*([\w-]+)\s*{re.escape(behind) or '(?=<)'}"
        )
        self._key_opening, behind = map(str.strip, tags.before.split("%s"))
        closings = r"\s*".join(map(re.escape, behind.split()))
        self._key = re.compile(rf"\s*{re.escape(self._key_opening)}\s*(.+?)\s*{closings}")

    @property
    def has_whole_calls(self) -> bool:
        """Whether there are calls, and the last one has all of its arguments."""
        return self.num_calls > 0 and not self._is_within

    @property
    def _is_within(self) -> bool:
        """Whether the arguments of a call have begun and not ended."""
        values = (self._take_padding, self._take_words, self._take_value)
        return self._step in (self._take_arguments, *values)

    def finish(self) -> Iterator[str | CallPiece]:
        """Yield what was held back; of a call that is cut, what is certain of it."""
        if self._step == self._take_words:
            yield self._piece(_escape(self._held))
        if self._is_within:
            self._held = ""
        yield from super().finish()

    def _piece(self, arguments: str) -> CallPiece:
        return CallPiece(self.num_calls - 1, self._name, arguments)

    def _take_call(self) -> Iterator[str | CallPiece]:
        head = self._held[:MOST_HEAD]
        match = self._head.match(head)
        if match and match[1] in self._names:
            yield from self._begin(match[1])
            self._held, self._step = self._held[match.end() :], self._take_arguments
            self._num_arguments = 0
        elif match or len(head) == MOST_HEAD or not self._may_be_head(head.lstrip()):
            yield from self._give_up()

    def _may_be_head(self, begun: str) -> bool:
        opening = self._head_opening
        if len(begun) < len(opening):
            return opening.startswith(begun)
        name = begun.removeprefix(opening) if begun.startswith(opening) else "<"
        return re.fullmatch(r"\s*[\w-]*\s*", name) is not None

    def _take_arguments(self) -> Iterator[str | CallPiece]:
        """Take the name of the next argument, or the end of all."""
        head = self._held[:MOST_HEAD]
        if match := self._key.match(head):
            self._held, self._step = self._held[match.end() :], self._take_padding
            self._kinds = self._kinds_of[self._name].get(match[1], ANY_KIND)
            self._num_arguments += 1
            opening = "{" if self._num_arguments == 1 else ", "
            yield self._piece(f"{opening}{json.dumps(match[1], ensure_ascii=False)}: ")
            return
        begun = self._held.lstrip()
        is_key = self._key_opening.startswith(begun) or begun.startswith(self._key_opening)
        is_key = is_key and len(head) < MOST_HEAD
        ends = [at for at, end in enumerate(self._ends) if begun.startswith(end)]
        may_end = not ends and any(end.startswith(begun) for end in self._ends)
        if is_key or may_end:
            return
        self._step = self._take_tail
        self._tail = self._ends[ends[0] :] if ends else []
        yield self._piece("}" if self._num_arguments else "{}")

    def _take_padding(self) -> Iterator[str | CallPiece]:
        if not self._held:
            return
        self._held = self._held.removeprefix(self._padding)
        self._step = self._take_words if self._kinds == _TEXT else self._take_value
        if self._kinds == _TEXT:
            yield self._piece('"')

    def _take_words(self) -> Iterator[str | CallPiece]:
        """Take what has come of a text."""
        at = self._held.find(self._closing)
        if at >= 0:
            yield self._piece(_escape(self._take_whole(at)) + '"')
            return
        ends = (self._padding + self._closing, self._closing)
        most = min(len(self._held), len(ends[0]) - 1)
        kept = (n for n in range(most, 0, -1) if any(e.startswith(self._held[-n:]) for e in ends))
        words = self._held[: len(self._held) - next(kept, 0)]
        self._held = self._held[len(words) :]
        if words:
            yield self._piece(_escape(words))

    def _take_value(self) -> Iterator[str | CallPiece]:
        """Take a value that is told when it is whole."""
        at = self._held.find(self._closing)
        if at >= 0:
            yield self._piece(read_value(self._take_whole(at), self._kinds))

    def _take_whole(self, at: int) -> str:
        """Return what is held before a closing tag, and go on behind that."""
        value = self._held[:at].removesuffix(self._padding)
        self._held = self._held[at + len(self._closing) :]
        self._step = self._take_arguments
        return value


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
