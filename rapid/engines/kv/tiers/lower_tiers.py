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

    def count_bytes(self) -> dict[str, int]:
        """Return the bytes that each holds, by its place as an `Erasure` has it."""
        found: dict[str, int] = {}
        if self.host is not None:
            found["host memory"] = self.host.page_bytes * len(self.host)
        if self.passages is not None:
            found["passages"] = self.passages.num_bytes
        if self.disk is not None:
            found["disk"] = self.disk.files.num_bytes
        return found

    def list_erasures(
        self, sizes: Mapping[str, int], found: Mapping[str, int], *, is_in_use: bool
    ) -> list[Erasure]:
        """Return what each has forgotten of some documents.

        Args:
            sizes: Bytes that each held before, as `count_bytes` gives them.
            found: Entries that held any of the documents, by the same names.
            is_in_use: Whether leases still read them.
        """
        pending = held = "in use" if is_in_use else None
        if self.host is not None and self.host.is_dirty:
            pending = "being copied"
        return [
            Erasure(place, size, found[place], held if place == "passages" else pending)
            for place, size in sizes.items()
        ]
