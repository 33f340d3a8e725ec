"""Text and ids: chat templates, tokenizers and the texts of tokens; engines handle ids only."""

from __future__ import annotations

import hashlib
import re
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import date, datetime
from itertools import accumulate
from types import FrameType
from typing import Any

from jinja2 import TemplateError

from rapid.calling.call_forms import HERMES, CallTokens, find_form
from rapid.calling.rendering import as_plain_chat, as_turns
from rapid.chat_messages import Message, Tool
from rapid.checkpoints.files import checkpoint_source, load_tokenizer, read_eos_ids
from rapid.checkpoints.thinking_marks import ThinkingMarks, find_marks
from rapid.checkpoints.token_texts import TextStream, TokenPieces
from rapid.errors import BadRequest, ConfigurationError

_PIECE_CHARACTERS = 2**16  # of a text whose tokens are counted piece by piece
_CUT_TOKENS = 16  # tokens of a piece that may be owed to its being cut
_MOST_TEMPLATE_S = 10.0  # of the processor, for one chat
_TEMPLATE_FILE = "<template>"  # as which jinja compiles what has no file


class ChatText:
    """The tokenizer, chat template and end-of-sequence tokens of one checkpoint.

    Methods that encode take time linear in the text and let other threads run meanwhile; call them
    off the event loop when the text may be long.

    Attributes:
        call_form: How it writes calls of tools.
        call_tokens: What its vocabulary has for that.
        thinking_marks: What opens and closes its thinking; None if it does not think apart.
    """

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        tokenizer.model_max_length = int(1e30)  # the tokenizer does not limit the length
        added = tokenizer.added_tokens_decoder
        self._hidden = eos_ids | {id_ for id_, token in added.items() if token.special}
        self._control = _control_tokens(tokenizer)
        form = find_form(str(tokenizer.chat_template))
        self._knows_tools, self.call_form = form is not None, form or HERMES
        # Which are those that llguidance takes for no text, as `<tool_call>` of Qwen.
        apart = {
            id_: token.content
            for id_, token in added.items()
            if token.special or (token.content[:1] == "<" and token.content[-1:] == ">")
        }
        self.call_tokens = CallTokens(
            tuple((text, id_) for id_, text in apart.items() if text in self.call_form.marks),
            tuple(
                id_
                for id_, text in apart.items()
                if text not in self.call_form.marks and id_ not in eos_ids
            ),
        )
        texts = {id_: token.content for id_, token in added.items()}
        self.thinking_marks = find_marks(str(tokenizer.chat_template), texts)
        self._pieces = TokenPieces(self._backend)

    @classmethod
    def load(cls, model: str) -> ChatText:
        """Load the tokenizer of a model, named as in `rapid.config.EngineConfig`.

        Raises:
            ConfigurationError: the tokenizer or its chat template is missing or unusable.
        """
        tokenizer = load_tokenizer(model)
        if not tokenizer.chat_template:
            raise ConfigurationError(
                f"model {model!r} has no chat template: take its instruction-tuned variant"
            )
        return cls(tokenizer, read_eos_ids(checkpoint_source(model), tokenizer))

    @property
    def fingerprint(self) -> str:
        """A hash of the tokenizer: equal ones cut every text into the same tokens."""
        serialized = self._backend.to_str().encode()
        return hashlib.blake2b(serialized, digest_size=12).hexdigest()

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        day: date,
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = True,
        thinks: bool | None = None,
    ) -> list[int]:
        """Render a chat with the model's template and return its token ids.

        Only the template produces control tokens: a message that spells one is encoded as the
        characters of the spelling.

        Args:
            day: date that templates get as the current time. With the real clock the same chat
                would give a new prompt every day.
            tools: what the model may call. A template that knows no tools, or writes calls in an
                unknown form, gets the chat in words that say the same.
            add_generation_prompt: whether the prompt ends where the answer begins.
            thinks: whether templates that ask shall have the model think; None does not say.

        Raises:
            BadRequest: the template refuses the chat, for instance because roles do not alternate,
                or computes for too long.
        """
        if not self._knows_tools:
            messages, tools = as_plain_chat(messages, tools), ()
        chat, described = (
            as_turns(messages, self.call_form),
            [each.describe() for each in tools] or None,
        )
        before = _told_day.set(day)
        try:
            spoofed = self._is_spoofed(chat) or self._is_spoofed(described)
            _pin_clock(self.tokenizer.get_chat_template(tools=described))
            with _limit_rendering():
                rendered = self.tokenizer.apply_chat_template(
                    chat,
                    # Qwen's and GLM's name; DeepSeek's and Granite's.
                    **({} if thinks is None else {"enable_thinking": thinks, "thinking": thinks}),
                    tools=described,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=spoofed,
                    sanitize_control_tokens=spoofed,
                    return_dict=False,
                )
        except (TemplateError, ValueError, RecursionError) as error:
            raise BadRequest(f"the model's chat template refuses: {error}", "messages") from error
        finally:
            _told_day.reset(before)
        return list(rendered) if spoofed else self.encode(rendered)

    def _is_spoofed(self, part: Any) -> bool:
        """Return whether a string in a part of a chat spells a control token."""
        if isinstance(part, str):
            return self._control.search(part) is not None
        if isinstance(part, dict):
            if any(map(self._is_spoofed, part)):  # which transformers would leave as it is
                raise BadRequest("a key in tools or their calls spells a control token", "tools")
            return any(map(self._is_spoofed, part.values()))
        return isinstance(part, list) and any(map(self._is_spoofed, part))

    def encode(self, text: str, *, adds_special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`; control tokens are recognised.

        Nothing is added, unless the tokenizer may add what it begins or ends a text with.
        """
        # The batch call, unlike the single one, releases the interpreter lock.
        (encoding,) = self._backend.encode_batch_fast(
            [text], add_special_tokens=adds_special_tokens
        )
        ids: list[int] = encoding.ids
        return ids

    def count_tokens(self, text: str) -> int:
        """Return the length of `text` in tokens."""
        return len(self.encode(text))

    def has_more_tokens(self, texts: Iterable[str], most: int) -> bool:
        """Return whether `texts` have certainly more than `most` tokens; False says nothing.

        The work is bounded by `most` and not by the texts.
        """
        for text in texts:  # a cut changes the tokens around it only
            for start in range(0, len(text), _PIECE_CHARACTERS):
                piece = text[start : start + _PIECE_CHARACTERS]
                most -= max(0, self.count_tokens(piece) - _CUT_TOKENS)
                if most < 0:
                    return True
        return False

    def token_offsets(self, text: str) -> list[tuple[int, int]]:
        """Return the character range [start, stop) of each token, for `retrieval.chunking`."""
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=False)
        offsets: list[tuple[int, int]] = encoding.offsets
        return offsets

    def find_tokens(self, token_ids: Sequence[int], texts: Iterable[str]) -> list[tuple[int, int]]:
        """Return the tokens [start, stop) that spell each of some texts, which come in order.

        They are none for a text that is not found, as where the tokenizer normalizes it.
        """
        pieces = [self._pieces[token_id] for token_id in token_ids]
        ends, spelled = [*accumulate(map(len, pieces))], b"".join(pieces)
        found, after = list[tuple[int, int]](), 0
        for text in map(str.encode, texts):
            if (start := spelled.find(text, after)) >= 0:
                after = start + len(text)
            span = bisect_right(ends, start), 1 + bisect_left(ends, after)
            found.append(span if start >= 0 else (0, 0))
        return found

    def decode(self, token_ids: Sequence[int], *, shows_special: bool = False) -> str:
        """Return the text of a whole answer, without its special tokens unless they are shown."""
        shown = [id_ for id_ in token_ids if shows_special or id_ not in self._hidden]
        text: str = self._backend.decode(shown, skip_special_tokens=False)
        return text

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, for log-probabilities.

        ``text.encode("utf-8", "surrogateescape")`` are its bytes, also where they are no UTF-8.
        """
        return self._pieces[token_id].decode("utf-8", "surrogateescape")

    def find_thinking(self, prompt_ids: Sequence[int]) -> bool | None:
        """Return whether a prompt ends within thinking; None if none can follow it."""
        if (marks := self.thinking_marks) is None:
            return None
        if not isinstance(marks, ThinkingMarks):  # which no prompt opens
            return False
        for token_id in reversed(prompt_ids):
            if token_id in (marks.opening, marks.closing):
                return True if token_id == marks.opening else None
            if not self.is_blank(token_id):
                break
        return False

    def is_blank(self, token_id: int) -> bool:
        """Return whether a token is white space alone."""
        return self._pieces[token_id].isspace()

    def stream(
        self,
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        *,
        includes_stop: bool = False,
        has_calls: bool = False,
        is_continued: bool = False,
    ) -> TextStream:
        """Return a decoder of one answer's ids, whose text ends before what stops it.

        Args:
            stop: Strings that end the text.
            stop_ids: Tokens that end the answer, beside the model's own.
            includes_stop: Whether the text has the string, or the token, that ends it.
            has_calls: Whether the text has the special tokens by which calls are known.
            is_continued: Whether it continues a text, and keeps the space at its start.
        """
        marks = self.call_tokens.marks if has_calls else ()
        hidden = self._hidden.difference(id_ for _, id_ in marks)
        hidden = hidden if includes_stop else hidden.union(stop_ids)
        return TextStream(
            self._pieces, hidden, tuple(stop), includes_stop=includes_stop, is_begun=is_continued
        )

    def stream_whole(self) -> TextStream:
        """Return a decoder that shows special tokens, too, but those that end an answer."""
        return TextStream(self._pieces, self.eos_ids, ())


_told_day: ContextVar[date | None] = ContextVar("told_day", default=None)


def _pin_clock(chat_template: str) -> None:
    """Make the template's `strftime_now` return the day of the chat that is being rendered."""
    # transformers passes no callable to a template, so the cached template's own is replaced
    from transformers.utils.chat_template_utils import _compile_jinja_template

    _compile_jinja_template(chat_template).environment.globals["strftime_now"] = _strftime_told


def _strftime_told(format: str) -> str:
    day = _told_day.get()
    now = datetime.now() if day is None else datetime(day.year, day.month, day.day)
    return now.strftime(format)


@contextmanager
def _limit_rendering() -> Iterator[None]:
    """End a template that this thread renders within with TemplateError, if it takes too long."""
    # A template is a program, perhaps from elsewhere, and can loop for ever. The processor time of
    # this thread is looked at between its lines, as a busy machine must not count. A single
    # operation is not interrupted.
    until = time.thread_time() + _MOST_TEMPLATE_S

    def trace(frame: FrameType, _event: str, _arg: Any) -> Any:
        if frame.f_code.co_filename != _TEMPLATE_FILE:
            return None
        if time.thread_time() > until:
            raise TemplateError(f"it computes for more than {_MOST_TEMPLATE_S:g} s")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _control_tokens(tokenizer: Any) -> re.Pattern[str]:
    """Return a pattern that matches special tokens and the template's control tokens."""
    template = str(tokenizer.chat_template)
    control = [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.special or (token.content in template and not token.content.isspace())
    ]
    return re.compile("|".join(map(re.escape, control)) or "(?!)")
