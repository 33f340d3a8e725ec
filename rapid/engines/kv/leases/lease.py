"""One lease: what a request holds on an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from rapid.engine_status import LeaseUsage
from rapid.engines.kv.cache import PageRun, Pages
from rapid.engines.kv.rings import Ring
from rapid.engines.kv.sequences import Sequence
from rapid.messages import LeaseRequest, ReadSoFar


@dataclass(eq=False)
class Lease:
    """A lease: the KV pages and sequences of one request on an engine."""

    request: LeaseRequest
    sequences: list[Sequence]
    runs: list[tuple[PageRun, ...]]  # the pages that each choice holds, as the pool counts them
    prompt_pages: Pages  # the full pages of the prompt, which other leases may share
    page_names: list[bytes]
    last_used: float  # time of the last use or renewal, in seconds of the ledger's clock
    expects_companion: bool  # whether room is kept for a second lease of the same request
    # Choices with a call in progress; a busy lease does not expire.
    busy: set[int] = field(default_factory=set)
    # Tokens of the prompt whose KV the first choice holds, as its prefill last said.
    read_so_far: ReadSoFar = field(default_factory=ReadSoFar)
    # Whether the lease ends when it is idle and unrenewed for the time-to-live.
    expires: bool = True
    # What it used and has not told yet, its pages up to a time of the ledger's clock.
    used: LeaseUsage = field(default_factory=LeaseUsage)
    booked_at: float = 0.0
    num_shared: int = 0  # full pages of the prompt, which all choices hold
    is_over: bool = False

    @property
    def lease_id(self) -> str:
        """The id that the caller chose."""
        return self.request.lease_id

    @property
    def num_pages(self) -> int:
        """Number of pages that it holds, those once that its choices share."""
        own = sum(run.stop - run.start for runs in self.runs for run in runs)
        return own - self.num_shared * (len(self.runs) - 1)

    @property
    def rings(self) -> list[Ring]:
        """The rings of its choices; none where all layers have pages."""
        return [sequence.ring for sequence in self.sequences if sequence.ring is not None]
