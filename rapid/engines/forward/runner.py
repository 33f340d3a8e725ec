"""Forwards of a loaded model over ragged batches of several sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from rapid.engines.attention.batch import Batch, Feed, assemble
from rapid.engines.attention.kernel_inputs import Kernels
from rapid.engines.forward.graphs.cuda_graphs import Capture, StepGraphs
from rapid.engines.forward.layers.decoder import decoder_of
from rapid.engines.forward.sharding.shards import RankPart
from rapid.engines.kv.cache import KVCache


class Runner:
    """The forward of one model over one KV cache, from feeds to logits."""

    def __init__(
        self,
        model: torch.nn.Module,
        cache: KVCache,
        device: torch.device,
        vocab_size: int,
        kernels: Kernels | None = None,
        place: RankPart | None = None,
    ) -> None:
        """Fuse the weights of a transformers model, or of one rank's part of it.

        Args:
            vocab_size: Number of token ids that logits are returned for.
            kernels: Attention kernels; None takes those of the cache's device.
            place: The rank, if the model is computed by several; they must run the same feeds.
        """
        self.cache = cache
        self.device = device
        self._layers = model.get_submodule("model")
        self._decoder = decoder_of(model, place)
        self._group = None if place is None else place.group
        self._lm_head = model.get_submodule("lm_head")
        settings: Any = model.config
        self._softcap: float | None = getattr(settings, "final_logit_softcapping", None)
        self._vocab_size = vocab_size
        self._kernels = kernels
        self._graphs: StepGraphs | None = None

    @property
    def frequencies(self) -> torch.Tensor | None:
        """Those by which keys of every layer turn; None where they are not known here."""
        return None if self._decoder is None else self._decoder.frequencies

    @torch.inference_mode()
    def capture_steps(self, max_context: int, capture: Capture, max_sequences: int = 0) -> None:
        """Run steps as captured graphs, if the kernels allow it.

        The common ones of up to `max_sequences` are captured now. The last `CHUNK_ROWS` slots of
        the cache must be unused, for padding is stored there.
        """
        may_capture = self._kernels is not None and self._kernels.captured is not None
        if self._all(may_capture):
            assert self._kernels is not None
            self._graphs = StepGraphs(
                self._forward,
                self.cache,
                self.device,
                self._kernels,
                max_context,
                capture,
                self._all,
            )
            self._graphs.capture_common(max_sequences)

    def _all(self, claim: bool) -> bool:
        """Return whether every rank claims it; a model in one process has one."""
        return claim if self._group is None else self._group.all(claim)

    @torch.inference_mode()
    def run(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        """Compute the feeds' rows in one forward, and return the wanted logits of each.

        They are float32 and cut to the shared vocabulary [num_wanted, vocab].
        """
        feeds = self._share_drawn(feeds)
        if self._graphs is None:
            logits = self._forward(assemble(feeds, self.cache, self.device, self._kernels))
        else:
            logits = self._graphs.run(feeds)
        return list(torch.split(logits.float(), [feed.num_wanted for feed in feeds]))

    def _share_drawn(self, feeds: Sequence[Feed]) -> Sequence[Feed]:
        """Return feeds with the first rank's drawn tokens, if they have any: it alone draws."""
        drawn = [feed.drawn for feed in feeds if feed.drawn is not None]
        if self._group is None or not drawn:
            return feeds
        tokens = torch.split(self._group.share_first(torch.cat(drawn)), 1)
        return [replace(feed, drawn=token) for feed, token in zip(feeds, tokens, strict=True)]

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Have a function called, on any thread, with what happened when ranks are lost."""

    def close(self) -> None:
        """Free what other processes hold for this runner; in one process there is nothing."""

    def _forward(self, batch: Batch) -> torch.Tensor:
        """Return the logits of the wanted rows in the model's dtype, [num_wanted, vocab]."""
        hidden = self._compute_hidden(batch)
        # The last layer may lie on another device than the first (``device: balanced``).
        wanted = hidden[:, batch.wanted.to(hidden.device)]
        logits: torch.Tensor = self._lm_head(wanted)[0]
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        if self._group is not None:
            logits = self._group.gather(logits)
        return logits[:, : self._vocab_size].to(self.device)

    def _compute_hidden(self, batch: Batch) -> torch.Tensor:
        """Return the hidden states of all rows after the last norm, [1, rows, hidden]."""
        if self._decoder is not None:
            return self._decoder(batch.input_ids, batch.position_ids, batch.rows)
        hidden: torch.Tensor = self._layers(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            ragged=batch.rows,
        ).last_hidden_state
        return hidden
