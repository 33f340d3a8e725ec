"""The KV tiers below the pool, host memory and disk: their counts, and what they delete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rapid.engine_status import Erasure
from rapid.engines.kv.passages import PassageCache
from rapid.engines.kv.tiers.disk_tier import DiskTier
from rapid.engines.kv.tiers.host_tier import HostTier


@dataclass(frozen=True, slots=True)
class LowerTiers:
    """Host memory, a disk and a cache of passages; None for those that an engine has not.

    The engine's lock is held while any of its methods is called.
    """

    page_tokens: int
    host: HostTier | None
    disk: DiskTier | None
    passages: PassageCache | None

    def count_tokens(self) -> dict[str, int]:
        """Return the tokens that each holds and that came back, by the names of `EngineStatus`."""
        tokens = self.page_tokens
        found: dict[str, int] = {}
        if self.host is not None:
            found |= {
                "host_tokens": tokens * len(self.host),
                "host_tokens_restored": tokens * self.host.num_restored,
            }
        if self.passages is not None:
            found |= {
                "passage_tokens": self.passages.num_tokens,
                "passage_tokens_placed": self.passages.num_placed,
            }
        if self.disk is not None:
            found |= {
                "disk_tokens": tokens * len(self.disk.files),
                "disk_tokens_read": tokens * self.disk.num_read,
            }
        return found

    def list_erasures(
        self, found: Mapping[str, int], on_disk: int, *, is_in_use: bool
    ) -> list[Erasure]:
        """Return what each has forgotten of some documents.

        Args:
            found: Entries that held any of them, by the name of where they were.
            on_disk: Files that did.
            is_in_use: Whether leases still read them.
        """
        pending = held = "in use" if is_in_use else None
        erasures = []
        if self.host is not None:
            pending = "being copied" if self.host.is_dirty else pending
            size = self.host.page_bytes * len(self.host)
            erasures.append(Erasure("host memory", size, found["host memory"], pending))
        if self.passages is not None:
            size = self.passages.num_bytes
            erasures.append(Erasure("passages", size, found["passages"], held))
        if self.disk is not None:
            erasures.append(Erasure("disk", self.disk.files.num_bytes, on_disk, pending))
        return erasures
