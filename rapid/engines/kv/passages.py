"""KV of passages that were each read by themselves, for all prompts in which they stand.

A passage is read after the first tokens of its prompt, the **sinks** that attention leans on, and
sees nothing else. Its keys are then those of the positions behind the sinks. Where it stands in a
prompt, they are turned by the distance to there: RoPE turns a key by an angle that is linear in its
position, so turning it again adds the two (Su et al., "RoFormer", arXiv 2104.09864, equation 34).
Values have no position. What a drafter so reads differs from what it would read of the whole, which
an exact target may bear: its answers do not depend on it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from hashlib import blake2b

import torch

from rapid.engines.kv.cache import KVCache, PageRun, PageTable
from rapid.engines.kv.packed_rows import Bits, pack_rows, unpack_rows
from rapid.messages import Int32Array

NUM_SINKS = 16  # first tokens of the prompt that every passage sees; four hold most of the weight
_NAME_BYTES = 16  # a BLAKE2b digest of 128 bits


@dataclass(eq=False, slots=True)
class KeptPassage:
    """The KV of one passage in host memory, its keys as they are behind the sinks.

    Attributes:
        blocks: By stack of the cache, what `pack_rows` returned.
        documents: Names of those of the requests that used it, for `PassageCache.forget`.
    """

    blocks: list[list[torch.Tensor]]
    tenant: str
    documents: frozenset[str]
    num_tokens: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its keys and values."""
        return sum(part.nbytes for block in self.blocks for part in block)


class PassageCache:
    """Passages by their content, the least recently used of the largest tenant dropped first.

    So a tenant keeps at least its part of the room, if all had equal ones. Only the compute thread
    uses it, except for the counts.
    """

    def __init__(
        self,
        cache: KVCache,
        frequencies: torch.Tensor,
        max_bytes: int,
        bits: Bits | None = None,
    ) -> None:
        """Start empty.

        Args:
            cache: The KV cache whose pages passages are read into and copied from.
            frequencies: Radians by which a key turns in a position, [rotated / 2].
            max_bytes: Most bytes of all passages.
            bits: Of each kept number; None keeps them as they are.
        """
        self._cache = cache
        self._bits = bits
        self._frequencies = frequencies.double()
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, KeptPassage] = OrderedDict()  # least recently used first
        self._bytes_of = Counter[str]()  # by tenant
        self.num_tokens = self.num_bytes = 0  # of the passages that are kept
        self.num_placed = 0  # tokens that were put into prompts from here
        self.num_overwritten = 0  # times that pages behind the computed tokens were

    def name(self, owner: str, sinks: Int32Array, token_ids: Int32Array) -> bytes:
        """Return the name of a passage behind some sinks, for whoever shares KV with `owner`."""
        key = blake2b(owner.encode(), digest_size=_NAME_BYTES).digest()
        key = blake2b(sinks.tobytes(), digest_size=_NAME_BYTES, key=key).digest()
        return blake2b(token_ids.tobytes(), digest_size=_NAME_BYTES, key=key).digest()

    def find(self, name: bytes, documents: Collection[str]) -> KeptPassage | None:
        """Return the passage of this name, used now for a prompt with some documents."""
        kept = self._kept.get(name)
        if kept is not None:
            self._kept.move_to_end(name)
            kept.documents |= frozenset(documents)
        return kept

    def keep(
        self, name: bytes, table: PageTable, start: int, stop: int, fresh: KeptPassage
    ) -> None:
        """Copy the KV at positions [start, stop), which is turned for the place behind the sinks.

        `fresh` is a passage without blocks, and becomes the one that is kept if there is room.
        """
        is_cuda = self._frequencies.is_cuda
        for stack in self._cache.stacks:
            parts = [stack[..., slots, :] for _, slots in _spans(table, start, stop)]
            packed = pack_rows(torch.cat(parts, 3), self._bits)
            if self._bits is not None:  # the first prompt reads what later ones will
                rows = unpack_rows(packed, self._bits)
                for inside, slots in _spans(table, start, stop):
                    stack[..., slots, :] = rows[..., inside, :]
            fresh.blocks.append([_copy_to_host(each, is_pinned=is_cuda) for each in packed])
        if (known := self._kept.get(name)) is not None:  # two prompts have read it at once
            fresh.documents |= known.documents
        self.drop(name)
        if fresh.num_bytes > self._max_bytes:
            return
        self._kept[name] = fresh
        self._bytes_of[fresh.tenant] += fresh.num_bytes
        self.num_bytes += fresh.num_bytes
        self.num_tokens += fresh.num_tokens
        while self.num_bytes > self._max_bytes:
            largest = max(self._bytes_of, key=lambda each: self._bytes_of[each])
            self.drop(next(n for n, each in self._kept.items() if each.tenant == largest))

    def place(
        self, kept: KeptPassage, table: PageTable, first: int, start: int, stop: int, by: int
    ) -> None:
        """Write a passage's part for [start, stop), keys turned `by`; it begins at `first`."""
        for stack, block in zip(self._cache.stacks, kept.blocks, strict=True):
            # Whole, as pinned memory is copied behind what is still on its way there.
            moved = [part.to(stack.device, non_blocking=True) for part in block]
            rows = unpack_rows(moved, self._bits)[..., start - first : stop - first, :]
            keys, values = rows.unbind(1)
            keys = self.turn(keys, by)
            for inside, slots in _spans(table, start, stop):
                stack[:, 0, :, slots] = keys[:, :, inside]
                stack[:, 1, :, slots] = values[:, :, inside]
        self.num_placed += stop - start

    def move(self, table: PageTable, start: int, stop: int, by: int) -> None:
        """Turn the keys at positions [start, stop), where they are, `by` positions."""
        for stack in self._cache.stacks:
            for _, slots in _spans(table, start, stop):
                stack[:, 0, :, slots] = self.turn(stack[:, 0, :, slots], by)

    def turn(self, keys: torch.Tensor, by: int) -> torch.Tensor:
        """Return keys [..., head_dim] as they are `by` positions further on.

        They are rounded once, to their own dtype. What of a head does not rotate stays.
        """
        half = len(self._frequencies)
        angles = by * self._frequencies  # in float64: far places are many turns
        cos, sin = angles.cos().float(), angles.sin().float()
        one, other = keys[..., :half].float(), keys[..., half : 2 * half].float()
        turned = torch.cat((one * cos - other * sin, other * cos + one * sin), -1)
        return torch.cat((turned.to(keys.dtype), keys[..., 2 * half :]), -1)

    def drop(self, name: bytes) -> None:
        """Overwrite and forget the passage of this name, if there is one."""
        kept = self._kept.pop(name, None)
        if kept is None:
            return
        self._bytes_of[kept.tenant] -= kept.num_bytes
        self._bytes_of += Counter()  # forgets tenants without passages
        self.num_bytes -= kept.num_bytes
        self.num_tokens -= kept.num_tokens
        if self._frequencies.is_cuda:  # a copy may be on its way
            torch.cuda.current_stream(self._frequencies.device).synchronize()
        for block in kept.blocks:
            for part in block:
                part.zero_()

    def forget(self, documents: Collection[str]) -> int:
        """Drop the passages of requests with any of some documents; return how many there were."""
        found = [n for n, each in self._kept.items() if not each.documents.isdisjoint(documents)]
        for name in found:
            self.drop(name)
        return len(found)


def _copy_to_host(part: torch.Tensor, *, is_pinned: bool) -> torch.Tensor:
    host = torch.empty(part.shape, dtype=part.dtype, pin_memory=is_pinned)
    return host.copy_(part, non_blocking=is_pinned)


def _spans(table: PageTable, start: int, stop: int) -> Iterator[tuple[slice, slice]]:
    """Yield the parts of the tokens at [start, stop) that lie together, from 0, and their slots."""
    position = 0
    for first, end in table.spans(start, stop):
        yield slice(position, position + end - first), slice(first, end)
        position += end - first


def splice(table: PageTable, num_sinks: int, start: int, stop: int) -> PageTable:
    """Return the table of a sequence of the sinks and the tokens at positions [start, stop)."""
    spans = (*table.spans(0, num_sinks), *table.spans(start, stop))
    return PageTable([PageRun(*span) for span in spans], 1)  # a slot is a page of one token
