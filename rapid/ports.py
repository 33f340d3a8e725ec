"""The seams between the method and whatever runs it: drafters, verifiers, leases, retrieval.

`Block` is opaque to the loop: in process it is an awaitable of a `DraftBlock`, over Ray an object
reference that travels from engine to engine without being opened on the way. A drafter that needs
no engine hands out the `DraftBlock` itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rapid.messages import Document, LeaseRequest, PrefillReceipt, Verdict

if TYPE_CHECKING:
    from rapid.config import WindowDrafting

Block = TypeVar("Block")
BlockOut = TypeVar("BlockOut", covariant=True)
BlockIn = TypeVar("BlockIn", contravariant=True)
Refresh = Callable[[tuple[int, ...]], Awaitable["Drafter[Any]"]]
"""Gives a drafter something else to read, given the tokens of the rounds so far.

Returns the drafter that goes on. Raises DrafterUnavailable where none can.
"""


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


class EngineLease(Protocol):
    """A lease on one engine: the KV of one request, wherever that engine runs."""

    @property
    def lease_id(self) -> str:
        """Its name on the engine."""
        ...

    @property
    def queued_s(self) -> float:
        """Seconds waited for it."""
        ...

    async def prefill(self) -> PrefillReceipt:
        """Have the engine read the prompt, and what was committed elsewhere."""
        ...

    def forgo_companion(self) -> None:
        """Keep no room for a second lease beside this one: none will come."""
        ...

    def drafter(self, choice: int) -> Drafter[Any]:
        """Return what drafts a choice on this lease."""
        ...

    def window_drafter(self, choice: int, window: WindowDrafting) -> Drafter[Any]:
        """Return what drafts a choice on a part of this lease's own KV."""
        ...

    def verifier(self, choice: int, drafter: Callable[[], EngineLease | None]) -> Verifier[Any]:
        """Return what judges a choice's blocks on this lease.

        Args:
            choice: which of the request's answers.
            drafter: names the lease that blocks come from at the time, if there is one: its
                failures are told from those of this one.
        """
        ...


class EnginePool(Protocol):
    """Somewhere that leases are taken: one engine, or a pool of replicas."""

    def lease(
        self, request: LeaseRequest, *, timeout_s: float | None, beside: EngineLease | None
    ) -> AbstractAsyncContextManager[EngineLease]:
        """Hold a lease while the context lasts; entering it waits for room.

        Args:
            request: what is to be read and how long answers may become.
            timeout_s: longest wait, in seconds; None waits without end.
            beside: the same request's lease on the engine that is to hold this one too.

        Raises:
            Overloaded: there was no room in time.
            RapidError: the pool cannot be reached, or refuses the request.
        """
        ...


class Chunk(Protocol):
    """A passage of a document that retrieval returned; offsets are characters."""

    @property
    def id(self) -> str: ...
    @property
    def document(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def score(self) -> float: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


class Found(Protocol):
    """What retrieval found, in document order."""

    @property
    def chunks(self) -> Sequence[Chunk]: ...

    @property
    def cleared_floor(self) -> bool:
        """Whether something had to do with the question, even if it did not fit the budget."""
        ...


class Retrieval(Protocol):
    """Finds passages of documents."""

    async def retrieve(
        self, tenant: str, documents: Sequence[Document], query: str, budget_tokens: int
    ) -> Found:
        """Return the passages worth reading, of `budget_tokens` tokens at most.

        Raises:
            RapidError: it cannot be asked.
        """
        ...


class Clock(Protocol):
    """Monotonic seconds."""

    def __call__(self) -> float:
        """Now."""
        ...
