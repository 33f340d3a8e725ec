"""The text of an answer without the thinking before it, where texts of several tokens mark it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from typing_extensions import override

from rapid.answering.thinking.thinking_stream import ThinkingStream
from rapid.checkpoints.text import ChatText
from rapid.checkpoints.thinking_marks import SpokenMarks
from rapid.checkpoints.token_texts import TextStream


class SpokenThinkingStream(ThinkingStream):
    """A `ThinkingStream` whose marks are found in the text, with its special tokens.

    The first tokens of an answer, and those behind its thinking, are undecided for as long as they
    may become a mark.
    """

    def __init__(self, text: ChatText, answer: TextStream, marks: SpokenMarks) -> None:
        """Begin an answer, which may begin with thinking."""
        super().__init__(text, answer, is_open=False)
        self._marks, self._whole = marks, text.stream_whole()
        self._heard = ""  # what is undecided, or may become the closing mark
        self._undecided: list[int] = []
        self._may_begin = True  # with a mark

    @property
    @override
    def num_undecided(self) -> int:
        return len(self._undecided)

    @override
    def push(self, token_ids: Sequence[int]) -> str:
        said = ""
        for at, token_id in enumerate(token_ids):
            if self._is_over:
                return said + self._answer.push(token_ids[at:])
            said += self._hear(token_id)
        return said

    @override
    def finish(self) -> str:
        if self._is_thinking:
            self._think(self._heard + self._whole.finish())
        return self._answer.push(self._decide()) + self._answer.finish()

    def _hear(self, token_id: int) -> str:
        """Take a token before the answer, and return the text of the answer that it begins."""
        if self._is_thinking:
            self.num_thinking += 1
            self._heard += self._whole.push([token_id])
            return self._follow_thoughts()
        if not self._may_begin:
            if self._text.is_blank(token_id):
                self.num_thinking += 1
                return ""
            self._is_over = True
            return self._answer.push([token_id])
        self._undecided.append(token_id)
        self._heard += self._whole.push([token_id])
        return self._begin()

    def _begin(self) -> str:
        """Decide, if that is possible, whether the answer begins with a mark."""
        heard, marks = self._heard.lstrip(), self._marks
        for mark in (marks.opening, *marks.of_answers):
            if heard.startswith(mark):
                self.num_thinking += len(self._decide())
                self._may_begin = False
                self._heard = heard.removeprefix(mark)
                self._is_thinking = mark == marks.opening
                return self._follow_thoughts() if self._is_thinking else self._end_marks()
        if any(mark.startswith(heard) for mark in (marks.opening, *marks.of_answers)):
            return ""
        self._is_over = True
        undecided = self._decide()
        if self.num_thinking:  # white space behind the thinking is of neither
            blank = len([*takewhile(self._text.is_blank, undecided)])
            self.num_thinking += blank
            undecided = undecided[blank:]
        return self._answer.push(undecided)

    def _decide(self) -> list[int]:
        undecided, self._undecided = self._undecided, []
        return undecided

    def _follow_thoughts(self) -> str:
        heard, closing = self._heard, self._marks.closing
        at = heard.find(closing)
        if at < 0:
            most = min(len(heard), len(closing) - 1)
            kept = next((n for n in range(most, 0, -1) if closing.startswith(heard[-n:])), 0)
            self._think(heard[: len(heard) - kept])
            self._heard = heard[len(heard) - kept :]
            return ""
        self._think(heard[:at])
        self._heard, self._is_thinking = heard[at + len(closing) :], False
        self._may_begin = bool(self._marks.of_answers) and not self._heard
        return "" if self._may_begin else self._end_marks()

    def _end_marks(self) -> str:
        """Return what the last token of a mark says beyond it, with which the answer begins."""
        said, self._heard = self._heard.lstrip(), ""
        self._is_over = bool(said)
        return said
