"""Grammars on an engine: of every row, the tokens that the grammar allows next.

The target's rows, the drafter's and the witness's are masked alike, before any question is asked
of them: the rule then holds for the masked distributions as for any others, and what the drafter
proposes is allowed.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, cached_property
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from typing_extensions import override

from rapid.constraints.grammar_checks import find_limits
from rapid.constraints.shaping import Shaping
from rapid.errors import BadRequest, GrammarTooComplex

# Grammars whose beginnings are kept, for requests that have the same again. Most have less than a
# megabyte and take milliseconds to compile; the largest found within the limits has 60 MB.
_MOST_COMPILED = 16
_MOST_MASKS = 64  # of an answer's last places, 16 KB each at 128K tokens: more than are rolled back
# Tokens of an answer from one matcher to the next. One that has consumed a path has a third of the
# states of one that has computed its masks, so that a long answer goes on three times as far.
_FEWEST_NEW = 256
_NUM_THREADS = 2  # 64 answers' blocks of eight are masked in 8 ms, beside a forward of as much

Answer = TypeVar("Answer")
Mask: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
"""Which tokens may come next, a bit each, the first one the lowest of its byte."""

# What is added to the logits of eight tokens, by their bits: `masked_fill` takes thrice the time.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_ADDED = np.where(_BITS, np.float32(0), np.float32(-np.inf))


class Grammars:
    """The grammars of a model's vocabulary; the vocabulary is read when the first one comes."""

    def __init__(self, tokenizer: Any, eos_ids: Collection[int], vocab_size: int) -> None:
        """Store a Hugging Face tokenizer, and which of its tokens end an answer."""
        self._tokenizer, self.eos_ids, self._vocab_size = tokenizer, eos_ids, vocab_size
        self._compiled = OrderedDict[str, LLMatcher]()  # in their first state
        self._lock = threading.Lock()

    def open(self, grammar: str) -> GrammarShaping:
        """Return the shaping of an answer that follows a grammar.

        A grammar that was not there lately takes milliseconds, and the first one seconds.

        Raises:
            GrammarTooComplex: It is.
            BadRequest: No token may begin an answer.
        """
        with self._lock:
            matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = self._compile(grammar)
            allowed = find_allowed(matcher)
            _check(matcher)
            if not allowed.any():
                raise BadRequest("The grammar allows no answer of these models.", "response_format")
        with self._lock:  # also because a matcher serves one thread at a time
            self._compiled[grammar] = matcher
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > _MOST_COMPILED:
                self._compiled.popitem(last=False)
            renew = functools.partial(self._renew, grammar, matcher)
            return GrammarShaping(matcher.deep_copy(), self.eos_ids, renew)

    def _compile(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._vocabulary, grammar, log_level=0, limits=find_limits())

    def _renew(self, grammar: str, matcher: LLMatcher) -> LLMatcher:
        """Return a matcher for one answer alone; the copies of the kept one have too many states.

        They share them, so that it is kept no longer for those who come next.
        """
        with self._lock:
            if self._compiled.get(grammar) is matcher:
                del self._compiled[grammar]
        return self._compile(grammar)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        backend = self._tokenizer.backend_tokenizer.to_str()
        return LLTokenizer(backend, n_vocab=self._vocab_size, eos_token=sorted(self.eos_ids))


class GrammarShaping(Shaping):
    """The mask of one answer's rows.

    Tokens that the grammar forbids have probability 0. Where one comes all the same, as in a block
    that copies from the prompt, it is refused by the row before it; the rows behind it, like those
    behind the end, are never used and stay as they are. Where the answers of a grammar have more
    states together than its library takes, each goes on with states of its own; where one alone
    has, that is its error.

    ::

        path      0 ............... place ................ reached
                  [ what comes next stands behind here |  rolled back, as drafts to be judged are ]

    The matcher stays at `reached` until another token comes than the path's: whoever goes on as it
    did before, such as a block that was drafted and is judged, pays for no token and no mask twice.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        eos_ids: Collection[int],
        renew: Callable[[], LLMatcher],
    ) -> None:
        """Begin with a matcher in its first state.

        Args:
            matcher: A copy, which shares its states with others.
            eos_ids: The tokens that end an answer.
            renew: Returns another one in its first state, which shares none.
        """
        self._matcher, self._eos_ids, self._renew = matcher, eos_ids, renew
        self._renewed_at = -_FEWEST_NEW  # the length of the path then
        self._is_lost = False  # in error, as is every matcher that comes as far
        self._num_behind = 0  # tokens from the first one on that is not the grammar's
        self._path: list[int] = []  # tokens that the matcher has consumed
        self._place = 0
        self._masks: dict[int, Mask] = {}  # by places of the path
        self._preparing: Future[None] | None = None

    @override
    def shape(self, row: torch.Tensor) -> torch.Tensor:
        self._settle()
        if self._is_lost:
            _check(self._matcher)
        return row if self._num_behind else forbid(row, self._find_mask())

    @override
    def advance(self, token_ids: Sequence[int]) -> None:
        self._settle()
        self._advance(token_ids)

    def _advance(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            is_text = not self._num_behind and token not in self._eos_ids
            if not is_text or not (self._is_ahead(token) or self._consume(token)):
                self._num_behind += 1
            else:
                self._place += 1

    def _is_ahead(self, token: int) -> bool:
        return self._place < len(self._path) and self._path[self._place] == token

    def _consume(self, token: int) -> bool:
        """Move the matcher behind a token that is not the path's next; False if it is forbidden."""
        self._leave_path()
        is_allowed = self._ask(lambda matcher: bool(matcher.try_consume_tokens([token])))
        self._path += [token] * is_allowed
        return is_allowed

    def _ask(self, ask: Callable[[LLMatcher], Answer]) -> Answer:
        """Return what the matcher answers, or, where it is in error, another one in its place."""
        answer = ask(self._matcher)
        num_new = len(self._path) - self._renewed_at
        if self._matcher.is_error() and num_new >= _FEWEST_NEW:
            self._matcher, self._renewed_at = self._renew(), len(self._path)
            self._matcher.try_consume_tokens(self._path)
            answer = ask(self._matcher)
        self._is_lost = self._matcher.is_error()
        return answer

    def _leave_path(self) -> None:
        """Move the matcher back to the place, and forget what was behind it."""
        reached = len(self._path)
        if self._place < reached:
            if not self._matcher.is_error():  # else `_ask` consumes what is left of the path
                self._matcher.rollback(reached - self._place)
            del self._path[self._place :]
            for place in range(self._place + 1, reached + 1):
                self._masks.pop(place, None)

    @override
    def roll_back(self, num_tokens: int) -> None:
        self._settle()
        self._roll_back(num_tokens)

    def _roll_back(self, num_tokens: int) -> None:
        behind = min(num_tokens, self._num_behind)
        self._num_behind -= behind
        self._place -= num_tokens - behind

    @override
    def count_allowed(self, token_ids: Sequence[int]) -> int:
        self._settle()
        count = 0
        for token in token_ids:
            # The mask decides: the matcher also takes other spellings of a text that must come.
            if self._num_behind or not self._find_mask()[token >> 3] >> (token & 7) & 1:
                break
            self._advance([token])
            count += 1
        self._roll_back(count)
        return count

    @override
    def prepare(self, token_ids: Sequence[int], num_rows: int) -> None:
        self._settle()
        last = self._place + len(token_ids)
        is_path = self._path[self._place : last] == [*token_ids]
        if not (is_path and all(last - row in self._masks for row in range(num_rows))):
            self._preparing = _open_threads().submit(self._prepare, [*token_ids], num_rows)

    def _prepare(self, token_ids: list[int], num_rows: int) -> None:
        first = len(token_ids) - num_rows + 1
        self._advance(token_ids[:first])
        try:
            for token in [*token_ids[first:], None]:
                if not self._num_behind:
                    self._find_mask()
                if token is not None:
                    self._advance([token])
        except GrammarTooComplex:  # which the row says
            return
        self._roll_back(len(token_ids))

    def _settle(self) -> None:
        """Wait for what another thread does, as the matcher serves one at a time."""
        preparing, self._preparing = self._preparing, None
        # What has not begun, as on a busy machine, is done here as fast.
        if preparing is not None and not preparing.cancel():
            preparing.result()

    def _find_mask(self) -> Mask:
        mask = self._masks.get(self._place)
        if mask is None:
            self._leave_path()
            mask = self._ask(find_allowed)
            _check(self._matcher)
            self._masks[self._place] = mask
            for place in [each for each in self._masks if each <= self._place - _MOST_MASKS]:
                del self._masks[place]
        return mask

    @override
    def find_forced(self) -> int | None:
        self._settle()
        if self._num_behind:
            return None
        try:
            mask = self._find_mask()
        except GrammarTooComplex:  # which the next row says
            return None
        (some,) = mask.nonzero()
        if len(some) != 1 or (bits := int(mask[some[0]])) & (bits - 1):
            return None
        return 8 * int(some[0]) + bits.bit_length() - 1


@cache
def _open_threads() -> ThreadPoolExecutor:
    """Return the threads that compute masks while forwards run."""
    return ThreadPoolExecutor(_NUM_THREADS, "rapid-masks")


def find_allowed(matcher: LLMatcher) -> Mask:
    """Return which tokens may come next, unless the matcher is in error behind this."""
    return np.frombuffer(matcher.compute_bitmask(), np.uint8)


def forbid(row: torch.Tensor, allowed: Mask) -> torch.Tensor:
    """Return a row of logits [vocab] in which only the allowed tokens are possible."""
    if row.is_cpu:
        added = torch.from_numpy(_ADDED.take(allowed, axis=0).ravel())
    else:  # the bits travel, which are a 32nd of the numbers
        bits = torch.from_numpy(allowed.copy()).to(row.device)
        added = torch.from_numpy(_ADDED).to(row.device)[bits.int()].flatten()
    num_more = len(row) - len(added)  # padding behind the vocabulary
    if num_more > 0:
        added = torch.nn.functional.pad(added, (0, num_more), value=-torch.inf)
    return row + added[: len(row)]


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        why = matcher.get_error().splitlines()[0]
        raise GrammarTooComplex(f"The grammar is too complex to follow: {why}")
