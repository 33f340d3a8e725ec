"""The seams of the loop: whoever has these methods is a drafter or a verifier.

`Block` is opaque to the loop: in process it is an awaitable of a `DraftBlock`, over Ray an object
reference that travels from engine to engine without being opened on the way. A drafter that needs
no engine hands out the `DraftBlock` itself.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from rapid.messages import Verdict

Block = TypeVar("Block")
BlockOut = TypeVar("BlockOut", covariant=True)
BlockIn = TypeVar("BlockIn", contravariant=True)


class Drafter(Protocol[BlockOut]):
    """Proposes the next tokens of one choice.

    A block may be shorter than asked for, and empty when there is nothing to propose. Whether a
    position is offered may depend on the committed text and on earlier proposals, never on what is
    drawn from its own: else the answer would not follow its contract.
    """

    def draft(self, verdict: Verdict | None, num_tokens: int) -> BlockOut:
        """Start drafting `num_tokens` after what `verdict` committed (None: after the prompt)."""
        ...


class Verifier(Protocol[BlockIn]):
    """Judges blocks and decodes on its own."""

    async def verify(self, block: BlockIn) -> Verdict:
        """Judge a block; the verdict's tokens are committed in the verifier's sequence.

        An empty block commits one token of the verifier's own distribution, as `decode` would: a
        round always gets the answer further.

        Raises:
            DrafterUnavailable: the block never came; nothing was committed.
        """
        ...

    async def decode(self, num_tokens: int) -> Verdict:
        """Commit up to `num_tokens` tokens of the verifier's own distribution."""
        ...


class Pace(Protocol):
    """Chooses how much is drafted in each round of one choice."""

    def next_length(self, limit: int) -> int:
        """Tokens to draft in the round that begins now, at most `limit`; 0 decodes plainly.

        It may depend on earlier rounds and on the time they took, never on what is drawn next.
        """
        ...

    def observe(self, verdict: Verdict) -> None:
        """That round has come to its verdict."""
        ...


class Clock(Protocol):
    """Monotonic seconds."""

    def __call__(self) -> float:
        """Now."""
        ...
