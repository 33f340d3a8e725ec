"""Deterministic forwards: the numbers of a position depend only on the tokens before it.

Every position is computed in the same place of a forward of one shape: one tile of `TILE_ROWS`
positions of one sequence, padded. So nothing else that is computed changes a bit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from typing_extensions import override

from rapid.engines.attention.batch import Batch, Feed, slots_of
from rapid.engines.attention.kernel_inputs import (
    AttentionInputs,
    Kernels,
    PartialKernel,
    RaggedRows,
)
from rapid.engines.attention.ragged import attend_to_self, merge, partial
from rapid.engines.attention.segments import Segment
from rapid.engines.attention.windows import edge_partial
from rapid.engines.forward.runner import Runner
from rapid.engines.forward.sharding.shards import RankPart
from rapid.engines.kv.cache import KVCache, PageTable
from rapid.engines.kv.rings import Ring
from rapid.errors import ConfigurationError

TILE_ROWS = 16  # in bfloat16 on a CPU a product of 16 rows takes about as long as one of 1


class TiledRunner(Runner):
    """A `Runner` whose logits and keys do not depend on the other rows of a step."""

    def __init__(
        self,
        model: torch.nn.Module,
        cache: KVCache,
        device: torch.device,
        vocab_size: int,
        kernels: Kernels | None = None,
        place: RankPart | None = None,
    ) -> None:
        """See `Runner`; the last slot of `cache` must be unused, for padding is stored there.

        Raises:
            ConfigurationError: a row of the model's products may depend on others (`decoder_of`).
        """
        super().__init__(model, cache, device, vocab_size, kernels or tile_kernels(), place)
        if self._decoder is None:
            raise ConfigurationError(
                "deterministic needs weights that are neither quantized by transformers nor spread "
                "over devices: leave deterministic out, or take such a checkpoint"
            )
        windows = [window for window in self._decoder.windows if window is not None]
        if min(windows, default=TILE_ROWS) < TILE_ROWS:
            raise ConfigurationError(
                f"deterministic needs sliding windows of at least {TILE_ROWS} tokens, not "
                f"{min(windows)}: leave deterministic out"
            )

    @override
    @torch.inference_mode()
    def run(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        """Compute the feeds as `Runner.run` does, but one after the other."""
        return [self._run_alone(_read_drawn(feed)) for feed in self._share_drawn(feeds)]

    def _run_alone(self, feed: Feed) -> torch.Tensor:
        """Return the wanted logits of one sequence's rows, float32 [num_wanted, vocab]."""
        first_wanted = feed.position + len(feed.token_ids) - feed.num_wanted
        logits = [torch.empty(0, self._vocab_size, device=self.device)]
        for position, token_ids in tiles(feed):
            stop = position + len(token_ids)
            is_wanted = stop > first_wanted
            batch = self._tile(feed, position, token_ids, is_wanted=is_wanted)
            computed = self._forward(batch)
            if is_wanted:
                start = position - position % TILE_ROWS
                wanted = slice(max(position, first_wanted) - start, stop - start)
                logits.append(computed[wanted].float())
        return torch.cat(logits)

    def _tile(
        self, feed: Feed, position: int, token_ids: Sequence[int], *, is_wanted: bool
    ) -> Batch:
        """Return the batch of one tile: its rows in their places, and padding in the others."""
        start, stop = position - position % TILE_ROWS, position + len(token_ids)
        before, after = position - start, start + TILE_ROWS - stop
        device = self.device

        def rows(table: PageTable | Ring, first: int, padding: int) -> RaggedRows:
            slots = slots_of(table, position, stop, feed.scratch if table is feed.table else None)
            padded = [*[padding] * before, *slots, *[padding] * after]
            past, own = table.spans(first, position), table.spans(first, stop)
            segment = Segment(before, before + len(token_ids), past, own)
            slots_there = torch.tensor(padded, device=device)
            return RaggedRows(self.cache, [segment], slots_there, self._kernels)

        all_rows = rows(feed.table, 0, self.cache.num_slots - 1)
        if feed.ring is not None:
            first = feed.ring.plan.first_seen(start)
            all_rows.rings = rows(feed.ring, first, self.cache.num_ring_slots - 1)
        return Batch(
            input_ids=torch.tensor([[0] * before + list(token_ids) + [0] * after], device=device),
            position_ids=torch.arange(start, start + TILE_ROWS, device=device)[None],
            wanted=torch.arange(TILE_ROWS if is_wanted else 0, device=device),
            rows=all_rows,
        )


def tiles(feed: Feed) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield the rows of a feed tile by tile: the position of the first, and their token ids."""
    position, stop = feed.position, feed.position + len(feed.token_ids)
    while position < stop:
        end = min(stop, position - position % TILE_ROWS + TILE_ROWS)
        yield position, feed.token_ids[position - feed.position : end - feed.position]
        position = end


def tile_kernels(kernel: PartialKernel = partial) -> Kernels:
    """Return the attention kernels of a `TiledRunner`, of which none can be captured.

    The numbers of `kernel` may depend on the values and shapes of its inputs only.
    """
    attend = functools.partial(attend_in_tile, kernel=kernel)
    return Kernels(attend, attend)


def attend_in_tile(inputs: AttentionInputs, kernel: PartialKernel) -> torch.Tensor:
    """Attend from one tile to the tiles before it and, causally, to itself.

    The segment of `inputs`, which has TILE_ROWS rows, covers those that are not padding; of
    [1, TILE_ROWS, heads, head_dim] the others have no meaning.
    """
    query, keys, rows = inputs.query, inputs.keys, inputs.rows
    (segment,) = rows.segments
    _, num_heads, num_rows, head_dim = query.shape
    num_kv_heads = keys.shape[0]
    slots = rows.once(
        ("slots in order", keys.device),
        lambda: torch.cat([torch.arange(a, b, device=keys.device) for a, b in segment.all_spans]),
    )
    num_before = len(slots) - segment.stop
    own = query.new_zeros(2, num_kv_heads, num_rows, head_dim)
    key, value = inputs.gather(slots[num_before:])
    own[0, :, : segment.stop], own[1, :, : segment.stop] = key[0], value[0]
    parts = [attend_to_self(query, own[:1], own[1:], inputs.scale, kernel)]
    packed = query.reshape(1, num_kv_heads, -1, head_dim)
    left_by_first = left_by_last = 0  # keys that have left the window of the first, the last row
    if inputs.window is not None:
        left_by_first = max(0, num_before + 1 - inputs.window)
        left_by_last = max(0, num_before + num_rows - inputs.window)
    if left_by_first < left_by_last:
        edge = slots[left_by_first:left_by_last]
        parts.append(edge_partial(packed, *inputs.gather(edge), inputs.scale, num_rows))
    if left_by_last < num_before:
        before = slots[left_by_last:num_before]
        seen = inputs.gather(before)
        parts.insert(0, kernel(packed, *seen, inputs.scale, is_causal=False))
    output = inputs.share_with_sinks(merge(parts))
    by_head = output.to(query.dtype).reshape(1, num_heads, num_rows, head_dim)
    return by_head.transpose(1, 2)


def _read_drawn(feed: Feed) -> Feed:
    """Return a feed whose token is known here: waiting for it is little beside such a forward."""
    if feed.drawn is None:
        return feed
    return replace(feed, token_ids=feed.drawn.tolist(), drawn=None)
