"""The events of an answer, from the orchestrator to whoever reads it, in the order they come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from rapid.receipt import Cause, Receipt

if TYPE_CHECKING:  # `benchmarks/gpu.py` runs without pydantic
    from rapid.config import Contract, Mode

FinishReason = str  # open: a dialect passes on what it does not know
STOP: FinishReason = "stop"  # the answer ended by itself
LENGTH: FinishReason = "length"  # it was cut
TOOL_CALLS: FinishReason = "tool_calls"  # it ended by itself, with calls


@dataclass(frozen=True, slots=True)
class Started:
    """The event that leases are held and the mode is resolved, so that the response may start.

    Attributes:
        reason: Why it is this mode, in a sentence.
        cause: The same as one of few words.
        prompt_tokens: Length of the prompt that is about to be read.
    """

    mode: Mode
    reason: str
    contract: Contract
    cause: Cause
    prompt_tokens: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Reading:
    """Progress of what an answer waits for: a prefill, or the indexing of its documents.

    Attributes:
        num_read: Tokens of the prompt that are read, or passages that are embedded.
        num_all: Tokens of the prompt, or passages as far as they are known; 0 where none is yet.
        unit: What is counted.
        num_cached: Tokens of those read that were found in a cache.
    """

    num_read: int
    num_all: int
    unit: Literal["tokens", "passages"] = "tokens"
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token as text with its log-probability and those of the best alternatives.

    A prompt's first token, which nothing precedes, has none: it is not a number.
    """

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What is new in one choice; each kind is a subclass, and a dialect renders those it knows.

    The last delta of a choice is a `TextDelta`, which may be empty, with the finish reason.

    Attributes:
        num_tokens: Tokens that were generated since the last delta of the choice.
    """

    choice: int
    num_tokens: int = field(default=0, compare=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class TextDelta(ChoiceDelta):
    """New text of one choice, of one or more rounds; the last carries the finish reason."""

    text: str
    logprobs: tuple[TokenText, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class ThinkingDelta(ChoiceDelta):
    """New of what a model thinks before it answers; no text of the choice comes before it."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta(ChoiceDelta):
    """New of one call of a tool: that it begins, and a piece of its arguments.

    A call has ended when another one begins or its choice ends, whose finish reason is then
    `TOOL_CALLS`.

    Attributes:
        index: Number of the call in its choice, from 0.
        id: Id of the call; the same in all of its deltas, as is the tool's `name`.
        arguments: Piece of a JSON object; the pieces of all deltas together are whole.
        begins: Whether the call begins with this delta.
    """

    index: int
    id: str
    name: str
    arguments: str
    begins: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """The event that all choices are complete."""

    receipt: Receipt


GenerationEvent = Started | Reading | ChoiceDelta | Finished
Tell = Callable[[Reading], None]
"""Function that is told how far something has come."""
