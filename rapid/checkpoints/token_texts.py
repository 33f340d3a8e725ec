"""The texts of tokens: the bytes of each, and an answer's text as soon as it is certain."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any


class TextStream:
    """A decoder that takes the ids of an answer and returns its text as soon as it is certain.

    It holds back the bytes of an incomplete character and any text that may become a stop string.
    The text depends on the ids only, not on how they are split into pushes.
    """

    def __init__(
        self,
        pieces: TokenPieces,
        hidden: frozenset[int],
        stop: tuple[str, ...],
        *,
        includes_stop: bool = False,
        is_begun: bool = False,
    ) -> None:
        self.stopped = False  # whether a stop string was found, with which the text ends
        self._includes_stop = includes_stop
        self.num_tokens = 0  # ids taken, up to the one that completed a stop string
        self._pieces, self._hidden, self._stop = pieces, hidden, stop
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = is_begun
        self._held = ""
        self._most_held = max((len(each) for each in stop), default=1) - 1

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next ids and return new text; ids after a stop string are ignored."""
        texts = []
        for token_id in token_ids:
            if self.stopped:
                break
            self.num_tokens += 1
            if token_id not in self._hidden:
                piece = self._pieces[token_id] if self._begun else self._pieces.first(token_id)
                self._begun = self._begun or not self._pieces.is_padding(token_id)
                texts.append(self._release(self._decoder.decode(piece)))
        return "".join(texts)

    def is_hidden(self, token_id: int) -> bool:
        """Return whether a token adds nothing to the text."""
        return token_id in self._hidden

    def finish(self) -> str:
        """Return the text that was held back; an incomplete character becomes U+FFFD."""
        if self.stopped:
            return ""
        text = self._release(self._decoder.decode(b"", final=True))
        text, self._held = text + self._held, ""
        return text

    def _release(self, new: str) -> str:
        if not self._stop or not new:
            return new
        text = self._held + new
        ends = [(at + len(s), at) for s in self._stop if (at := text.find(s)) >= 0]
        if ends:  # the stop that is completed first; of several, the one that begins first
            self.stopped, self._held = True, ""
            after, before = min(ends)
            return text[: after if self._includes_stop else before]
        most = min(len(text), self._most_held)
        keep = next((n for n in range(most, 0, -1) if self._may_become_stop(text[-n:])), 0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _may_become_stop(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stop)


class TokenPieces(dict[int, bytes]):
    """The bytes that each token adds to a text, computed on first use."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self._backend = backend
        self._is_byte_level = "ByteLevel" in _decoder_kinds(backend)
        self._has_byte_names = "ByteFallback" in _decoder_kinds(backend)
        self._anchor = backend.encode("a", add_special_tokens=False).ids[-1:]

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            piece = b""
        elif self._is_byte_level:
            piece = _spell_bytes(token)
        elif self._has_byte_names and _BYTE_NAME.fullmatch(token):
            piece = bytes.fromhex(token[3:5])
        else:
            # Behind another token, because the decoder drops a leading space (sentencepiece).
            whole = self._decode([*self._anchor, token_id])
            piece = whole[len(self._decode(self._anchor)) :].encode()
        self[token_id] = piece
        return piece

    def is_padding(self, token_id: int) -> bool:
        """Return whether the id is beyond the vocabulary: padding of the logits, without text."""
        return self._backend.id_to_token(token_id) is None

    def first(self, token_id: int) -> bytes:
        """Return the token's bytes where it begins the text."""
        piece = self[token_id]
        if self._is_byte_level or piece[:1] > b"\x7f":
            return piece
        return self._decode([token_id]).encode()

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=False)
        return text


_BYTE_NAME = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def _byte_spelling() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelling = {chr(byte): byte for byte in printable}
    return spelling | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_spelling()


def _spell_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:  # an added token, which is not spelled in bytes
        return token.encode()


def _decoder_kinds(backend: Any) -> set[str]:
    if backend.decoder is None:
        return set()
    decoder = json.loads(backend.decoder.__getstate__())
    return {each["type"] for each in decoder.get("decoders", [decoder])}
