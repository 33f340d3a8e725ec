"""Orders of the first rank to the others, their answers, and how a forward's inputs travel."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rapid.config import EngineConfig
from rapid.engines.attention.batch import Feed
from rapid.engines.forward.sharding.meeting import Meeting
from rapid.engines.forward.sharding.shards import Shard
from rapid.engines.kv.cache import PageRun, PageTable
from rapid.engines.kv.rings import Ring
from rapid.messages import Int32Array, as_prompt

_MOST_TABLES = 256  # of sequences, kept from step to step: up to 32 KB each at 128K tokens
BEAT_S = 0.5  # without anything to say, after which a rank says that it lives


@dataclass(frozen=True, slots=True)
class Load:
    """Load a part of the model; answered by the checkpoint's fingerprint, or an error's text."""

    config: EngineConfig
    shard: Shard
    meeting: Meeting


@dataclass(frozen=True, slots=True)
class Meet:
    """Connect with the other ranks."""


@dataclass(frozen=True, slots=True)
class Open:
    """Allocate the KV of an engine."""

    engine: int
    config: EngineConfig
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Close:
    """Free the KV of an engine."""

    engine: int


@dataclass(frozen=True, slots=True)
class End:
    """End the process."""


@dataclass(frozen=True, slots=True)
class PackedFeed:
    """A `Feed` as it travels."""

    token_ids: Int32Array  # int32 [rows]
    position: int
    pages: Int32Array  # first and last but one page of each run, int32 [2 * runs]
    num_wanted: int
    unseen: tuple[int, int]
    ring: Ring | None
    scratch: int | None
    is_drawn: bool  # whether its token is on the first rank's device, which shares it

    @classmethod
    def of(cls, feed: Feed) -> PackedFeed:
        """Pack a feed."""
        pages = [page for run in feed.table.runs for page in (run.start, run.stop)]
        return cls(
            as_prompt(feed.token_ids),
            feed.position,
            as_prompt(pages),
            feed.num_wanted,
            feed.unseen,
            feed.ring,
            feed.scratch,
            feed.drawn is not None,
        )

    def feed(self, page_tokens: int, device: torch.device) -> Feed:
        """Return the feed, with room for a token that is drawn."""
        return Feed(
            self.token_ids.tolist(),
            self.position,
            _table_of(self.pages.tobytes(), page_tokens),
            self.num_wanted,
            self.unseen,
            self.ring,
            self.scratch,
            torch.zeros(1, dtype=torch.int64, device=device) if self.is_drawn else None,
        )


@functools.lru_cache(_MOST_TABLES)
def _table_of(pages: bytes, page_tokens: int) -> PageTable:
    pairs = np.frombuffer(pages, dtype=np.int32).reshape(-1, 2).tolist()
    return PageTable([PageRun(start, stop) for start, stop in pairs], page_tokens)


@dataclass(frozen=True, slots=True)
class Forward:
    """Run one forward."""

    engine: int
    feeds: Sequence[PackedFeed]


@dataclass(frozen=True, slots=True)
class CopySlots:
    """Copy slots of the KV; see `KVCache.copy`."""

    engine: int
    sources: Sequence[tuple[int, int]]
    destinations: Sequence[tuple[int, int]]
    of_rings: bool


@dataclass(frozen=True, slots=True)
class CopyPages:
    """Launch a copy of pages between the KV and host memory; see `HostTier.copy`."""

    engine: int
    pages: slice
    host_pages: slice
    is_restore: bool


@dataclass(frozen=True, slots=True)
class ZeroSlots:
    """Overwrite slots of the KV with zeros; see `KVCache.zero`."""

    engine: int
    spans: Sequence[tuple[int, int]]
    of_rings: bool


@dataclass(frozen=True, slots=True)
class ZeroHostPages:
    """Overwrite pages of host memory with zeros; see `HostTier.zero`."""

    engine: int
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class AwaitCopies:
    """Begin the next forwards after the earliest launched copies; see `HostTier.await_copies`."""

    engine: int
    number: int


@dataclass(frozen=True, slots=True)
class OpenFiles:
    """Find the files of the rank's pages; answered by whether their folder can be used."""

    engine: int
    number: int
    context: bytes  # the first rank's digest of what pages must have in common


@dataclass(frozen=True, slots=True)
class WritePage:
    """Write the file of a page that is in host memory; answered by whether it was written."""

    engine: int
    number: int
    name: bytes
    tenant: str
    host_page: int
    documents: Collection[str]


@dataclass(frozen=True, slots=True)
class ReadPage:
    """Read the file of a page into host memory; answered by whether it was there, and right."""

    engine: int
    number: int
    name: bytes
    host_page: int


@dataclass(frozen=True, slots=True)
class UsePages:
    """Note that a prompt has these pages, so that other files give way before theirs."""

    engine: int
    names: Sequence[bytes]
    documents: Collection[str]  # that stand in the prompt


@dataclass(frozen=True, slots=True)
class ForgetPages:
    """Remove the files of documents' pages; answered by whether they are gone."""

    engine: int
    number: int
    documents: Collection[str]


@dataclass(frozen=True, slots=True)
class Beat:
    """A rank lives; said in both directions."""


Order = (
    Load | Meet | Open | Close | End
    | Forward | CopySlots | CopyPages | ZeroSlots | ZeroHostPages | AwaitCopies
    | OpenFiles | WritePage | ReadPage | UsePages | ForgetPages | Beat
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Loaded:
    """A rank has loaded its part, of files with this fingerprint, or met an error."""

    fingerprint: str | None
    error: str | None


@dataclass(frozen=True, slots=True)
class Done:
    """A rank has carried out the order of this number, which went well or did not."""

    number: int
    is_good: bool


Answer = Loaded | Done | Beat
