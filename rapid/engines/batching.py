"""From work items to one ragged forward: rows of many sequences side by side, in one batch of 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rapid.engines.attention import Kernels, RaggedRows, Segment
from rapid.engines.cuda_graphs import Capture, StepGraphs
from rapid.engines.decoder import decoder_of
from rapid.engines.kv_cache import KVCache, PageTable


@dataclass(frozen=True, slots=True)
class Feed:
    """The next rows of one sequence.

    Attributes:
        token_ids: what the rows consume.
        position: of the first, counted from the start of the prompt.
        num_wanted: how many of the last rows need logits; 0 for a prefill chunk.
        unseen: earlier positions [a, b) that the rows do not attend to.
    """

    token_ids: Sequence[int]
    position: int
    table: PageTable
    num_wanted: int
    unseen: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of one forward.

    Attributes:
        input_ids: [1, rows].
        position_ids: [1, rows].
        wanted: indices of the rows whose logits are computed [num_wanted].
        rows: the same rows as attention sees them.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    wanted: torch.Tensor
    rows: RaggedRows


def assemble(
    feeds: Sequence[Feed],
    cache: KVCache,
    device: torch.device,
    kernels: Kernels | None = None,
) -> Batch:
    """Lay the feeds' rows one after the other."""
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    wanted: list[int] = []
    segments: list[Segment] = []
    for feed in feeds:
        first, position = len(input_ids), feed.position
        stop = position + len(feed.token_ids)
        input_ids += feed.token_ids
        positions += range(position, stop)
        for span in feed.table.spans(position, stop):
            slots += range(*span)
        end = len(input_ids)
        wanted += range(end - feed.num_wanted, end)
        before, after = feed.unseen
        sinks = feed.table.spans(0, before)
        segments.append(
            Segment(
                first,
                end,
                sinks + feed.table.spans(after, position),
                sinks + feed.table.spans(after, stop),
            )
        )
    return Batch(
        input_ids=torch.tensor([input_ids], device=device),
        position_ids=torch.tensor([positions], device=device),
        wanted=torch.tensor(wanted, dtype=torch.long, device=device),
        rows=RaggedRows(cache, segments, torch.tensor(slots, device=device), kernels),
    )


class Runner:
    """One model over one KV cache: feeds in, logits out."""

    def __init__(
        self,
        model: torch.nn.Module,
        cache: KVCache,
        device: torch.device,
        vocab_size: int,
        kernels: Kernels | None = None,
    ) -> None:
        self.cache = cache
        self._layers = model.get_submodule("model")
        self._decoder = decoder_of(model)
        self._lm_head = model.get_submodule("lm_head")
        self._device = device
        self._vocab_size = vocab_size
        self._kernels = kernels
        self._graphs: StepGraphs | None = None

    def capture_steps(self, max_context: int, capture: Capture) -> None:
        """Run steps of recurring shapes as captured graphs, if the kernels allow it."""
        if self._kernels is not None and self._kernels.captured is not None:
            self._graphs = StepGraphs(self._forward, self._kernels, max_context, capture)

    @torch.inference_mode()
    def run(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        """Compute the feeds' rows in one forward.

        The last layer may lie on another device than the first (``device: balanced``): rows are
        chosen where the hidden states are, and the logits come back to where the inputs were.

        Returns:
            Per feed its wanted logits, float32, cut to the shared vocabulary [num_wanted, vocab].
        """
        batch = assemble(feeds, self.cache, self._device, self._kernels)
        logits = (self._forward if self._graphs is None else self._graphs.run)(batch)
        return list(torch.split(logits.float(), [feed.num_wanted for feed in feeds]))

    def _forward(self, batch: Batch) -> torch.Tensor:
        """Logits of the wanted rows, in the model's dtype [num_wanted, vocab]."""
        hidden = self._hidden(batch)
        wanted = hidden[:, batch.wanted.to(hidden.device)]
        logits: torch.Tensor = self._lm_head(wanted)[0, :, : self._vocab_size]
        return logits.to(self._device)

    def _hidden(self, batch: Batch) -> torch.Tensor:
        """Of all rows, after the last norm [1, rows, hidden]."""
        if self._decoder is not None:
            return self._decoder(batch.input_ids, batch.position_ids, batch.rows)
        hidden: torch.Tensor = self._layers(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            ragged=batch.rows,
        ).last_hidden_state
        return hidden
