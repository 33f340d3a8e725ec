"""The text of an answer without the thinking before it, which is told apart by its tokens."""

from __future__ import annotations

from collections.abc import Sequence

from rapid.checkpoints.text import ChatText
from rapid.checkpoints.thinking_marks import ThinkingMarks
from rapid.checkpoints.token_texts import TextStream


class ThinkingStream:
    """A decoder of an answer's tokens that may begin with thinking.

    White space around the thinking is of neither. Both texts depend on the ids only, not on how
    they are split into pushes, and what ends the answer is not looked for in the thinking.

    Attributes:
        num_thinking: Tokens of thinking so far, with its marks and the white space behind it.
    """

    def __init__(self, text: ChatText, answer: TextStream, *, is_open: bool | None) -> None:
        """Begin an answer.

        Args:
            text: The tokenizer.
            answer: Decoder of what is not thinking.
            is_open: Whether the prompt has opened the thinking; None where there can be none.
        """
        self.num_thinking = 0
        self._text, self._answer = text, answer
        self._thoughts = text.stream()
        self._is_thinking, self._is_over = bool(is_open), is_open is None
        self._held, self._new, self._has_thought = "", "", False

    @property
    def num_undecided(self) -> int:
        """The number of the last ids taken that may be thinking or the answer."""
        return 0

    @property
    def num_tokens(self) -> int:
        """The number of ids taken, up to the one that completed a stop string."""
        return self.num_thinking + self.num_undecided + self._answer.num_tokens

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found, with which the text ends."""
        return self._answer.stopped

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next ids and return new text of the answer."""
        before = self.num_thinking
        while not self._is_over and self.num_thinking - before < len(token_ids):
            if self._take(token_ids[self.num_thinking - before]):
                self.num_thinking += 1
        return self._answer.push(token_ids[self.num_thinking - before :])

    def take_thoughts(self) -> str:
        """Return the new text of thinking since this was last asked."""
        thoughts, self._new = self._new, ""
        return thoughts

    def is_hidden(self, token_id: int) -> bool:
        """Return whether a token adds nothing to the text."""
        return self._answer.is_hidden(token_id)

    def finish(self) -> str:
        """Return the text of the answer that was held back; thinking may end as well."""
        if self._is_thinking:
            self._think(self._thoughts.finish())
        return self._answer.finish()

    def _take(self, token_id: int) -> bool:
        """Return whether a token is still before the answer, and take it if so."""
        marks = self._text.thinking_marks
        assert isinstance(marks, ThinkingMarks)
        if self._is_thinking:
            self._is_thinking = token_id != marks.closing
            thoughts = self._thoughts
            self._think(thoughts.push([token_id]) if self._is_thinking else thoughts.finish())
        elif not self.num_thinking and token_id == marks.opening:
            self._is_thinking = True
        else:  # the blanks of an answer that was not thought about are its own
            self._is_over = not (self.num_thinking and self._text.is_blank(token_id))
        return not self._is_over

    def _think(self, text: str) -> None:
        text = self._held + text if self._has_thought else text.lstrip()
        kept = text.rstrip()
        self._held = text[len(kept) :]
        self._new += kept
        self._has_thought = self._has_thought or bool(kept)
