"""Protocols between the method and its runtime: drafters, verifiers, leases and retrieval.

`Block` is opaque to the loop. In process it is an awaitable of a `DraftBlock`; over Ray it is an
object reference that travels from engine to engine without being resolved on the way. A drafter
that needs no engine returns the `DraftBlock` itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rapid.chat_messages import Document, DocumentRef
from rapid.engine_status import LeaseUsage
from rapid.events import Tell
from rapid.messages import LeaseRequest, PrefillReceipt, ReadSoFar, Verdict

if TYPE_CHECKING:
    from rapid.config import WindowDrafting

Block = TypeVar("Block")
BlockOut = TypeVar("BlockOut", covariant=True)
BlockIn = TypeVar("BlockIn", contravariant=True)
Refresh = Callable[[tuple[int, ...]], Awaitable["Drafter[Any] | None"]]
"""Function from the tokens of the rounds so far to a drafter that has read another prompt.

It returns None where there is nothing else to read, and the drafter stays as it is. It raises
DrafterUnavailable if no drafter can continue.
"""


class Drafter(Protocol[BlockOut]):
    """A source of draft blocks for one choice.

    A block may be shorter than requested, and empty when there is nothing to propose. Whether a
    position is offered may depend on the committed text and on earlier proposals, but never on the
    token drawn from its own proposal: otherwise the answer would not follow its contract.
    """

    def draft(self, verdict: Verdict | None, num_tokens: int) -> BlockOut:
        """Start drafting `num_tokens` tokens after those that `verdict` committed.

        A verdict of None stands for no new tokens: drafting starts where the drafter's own
        sequence ends, at first after the prompt.
        """
        ...


class Verifier(Protocol[BlockIn]):
    """A model that judges draft blocks and decodes on its own."""

    async def verify(self, block: BlockIn) -> Verdict:
        """Judge a block and commit the verdict's tokens to the verifier's sequence.

        For an empty block one token of the verifier's own distribution is committed, as by
        `decode`, so that every round extends the answer.

        Raises:
            DrafterUnavailable: The drafter delivered no block; nothing was committed.
        """
        ...

    async def decode(self, num_tokens: int) -> Verdict:
        """Commit up to `num_tokens` tokens of the verifier's own distribution."""
        ...


class Pace(Protocol):
    """A policy for the draft length of each round of one choice."""

    def next_length(self, limit: int) -> int:
        """Return the number of tokens to draft in the round that begins now; 0 decodes plainly.

        The result is at most `limit`. It may depend on earlier rounds and their times, but never
        on the tokens that are drawn next.
        """
        ...

    def observe(self, verdict: Verdict) -> None:
        """Record the verdict of the round that `next_length` began."""
        ...


class EngineLease(Protocol):
    """A lease on a local or remote engine, which holds the KV of one request."""

    @property
    def lease_id(self) -> str:
        """The id of the lease on its engine."""
        ...

    @property
    def queued_s(self) -> float:
        """The wait for the lease, in seconds."""
        ...

    async def prefill(self) -> PrefillReceipt:
        """Compute the KV of the prompt and of tokens that were committed elsewhere."""
        ...

    async def read_so_far(self) -> ReadSoFar:
        """Return how much of the prompt `prefill` has read so far.

        Raises:
            RapidError: The engine cannot be asked, or the lease has ended.
        """
        ...

    async def settle(self) -> LeaseUsage:
        """Return what the lease used of its engine since this was last asked.

        Raises:
            RapidError: The engine cannot be asked, or the lease has ended.
        """
        ...

    def forgo_companion(self) -> None:
        """Free the room reserved for a second lease on the same engine."""
        ...

    def drafter(self, choice: int, window: WindowDrafting | None = None) -> Drafter[Any]:
        """Return a drafter for a choice on this lease, which may attend to a window of its KV."""
        ...

    def verifier(
        self,
        choice: int,
        drafter: Callable[[], EngineLease | None],
        witness: Callable[[], EngineLease | None],
    ) -> Verifier[Any]:
        """Return the verifier of a choice on this lease.

        Args:
            choice: Index of the request's answer.
            drafter: Function that returns the lease that blocks currently come from, or None. The
                verifier uses it to tell the drafter's failures from its own.
            witness: Function that returns the lease beside this one on which the same model
                currently reads the retrieved text, or None. Blocks are judged with both readings.
        """
        ...


class EnginePool(Protocol):
    """One engine or a pool of replicas, from which leases are taken."""

    def lease(
        self, request: LeaseRequest, *, timeout_s: float | None, beside: EngineLease | None
    ) -> AbstractAsyncContextManager[EngineLease]:
        """Hold a lease for the duration of the context; entering the context waits for room.

        Args:
            request: The prompt and the length of its answers.
            timeout_s: Longest wait, in seconds; None waits without limit.
            beside: The request's other lease, whose engine must hold this one too.

        Raises:
            Overloaded: There was no room in time.
            RapidError: The pool cannot be reached, or it refused the request.
        """
        ...


class Passage(Protocol):
    """A retrieved passage of a document; `start` and `end` are character offsets."""

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
    """The result of retrieval, in document order."""

    @property
    def chunks(self) -> Sequence[Passage]: ...

    @property
    def passages(self) -> Sequence[Passage]:
        """The chunks without what stands in the ones before, for a prompt with each by itself."""
        ...

    @property
    def cleared_floor(self) -> bool:
        """Whether any passage was worth showing, even if it did not fit the budget."""
        ...

    @property
    def is_evidence(self) -> bool:
        """Whether the passages have enough to do with the question to rely on them."""
        ...


class DocumentResolver(Protocol):
    """A source of the texts of documents that requests refer to."""

    async def resolve(self, tenant: str, documents: Sequence[DocumentRef]) -> tuple[Document, ...]:
        """Return documents of a tenant with their texts, in order.

        Raises:
            UnknownDocument: One is unknown, or is not the tenant's.
        """
        ...


class Retrieval(Protocol):
    """A search over documents."""

    async def retrieve(
        self,
        tenant: str,
        documents: Sequence[Document],
        query: str,
        budget_tokens: int,
        *,
        weight: int = 1,
        tell: Tell | None = None,
    ) -> Found:
        """Return the relevant passages, of at most `budget_tokens` tokens together.

        The tenant has `weight` shares of another's in the turns at indexing, from now on. `tell` is
        told now and then how many passages of new documents are embedded.

        Raises:
            RapidError: Retrieval is unavailable.
        """
        ...


class Clock(Protocol):
    """A monotonic clock."""

    def __call__(self) -> float:
        """Return the current time, in seconds."""
        ...
