"""Self-drafting by the target on attention sinks and a recent window of its own KV.

This is MagicDec (arXiv 2408.11049) with the fixed part of the KV that StreamingLLM keeps (Xiao et
al., arXiv 2309.17453), at the true positions. A proposal depends on where its block began; the
answer's distribution does not.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

import torch
from typing_extensions import override

from rapid.config import WindowDrafting
from rapid.engines.attention.batch import Feed
from rapid.engines.kv.leases.lease import Lease
from rapid.engines.kv.sequences import Proposal
from rapid.engines.work.drafting import Drafting
from rapid.speculation.questions import Answer


class WindowDraft(Drafting):
    """Call for a block whose rows attend only to the sinks and to the last `window` tokens.

    The KV that they write lies behind the committed tokens, where `Verify` computes the same rows
    again in full attention. It is not counted as computed.
    """

    def __init__(
        self,
        lease: Lease,
        choice: int,
        window: WindowDrafting,
        num_tokens: int,
        eos_ids: Set[int],
    ) -> None:
        super().__init__(lease, choice, num_tokens, eos_ids)
        self._window = window
        self._token_ids: list[int] = []
        self._proposals: list[Proposal] = []
        self._num_seen = 0  # of the last committed token and those, whose rows were computed

    @override
    def begin(self) -> None:
        super().begin()
        self.sequence.drop_speculation()
        self._num_tokens = self._within_room(self._num_tokens)
        self._go_on()

    def _go_on(self) -> None:
        self.add_forced()
        drafted = self._token_ids
        if drafted and (len(drafted) == self._num_tokens or self._is_block_over()):
            self._hand_out(drafted, self._proposals)

    @override
    def _fits(self, limit: int) -> bool:
        return False  # rows before the drafted ones attend to everything

    @override
    def _feed_wanted(self) -> Feed:
        sequence = self.sequence
        self._num_fed, self._is_behind = 0, False
        token_ids = [sequence.token_ids[-1], *self._token_ids][self._num_seen :]
        position = len(sequence.token_ids) - 1 + self._num_seen
        return Feed(token_ids, position, sequence.table, 1, self._unseen(position), sequence.ring)

    @override
    def follow(self, feed: Feed, token: torch.Tensor) -> Feed:
        after = super().follow(feed, token)
        return replace(after, unseen=self._unseen(after.position))

    def _unseen(self, position: int) -> tuple[int, int]:
        """Return the positions [a, b) that the row at a position does not attend to."""
        before, after = self._window.num_sinks, position + 1 - self._window.window
        return (before, after) if before < after else (0, 0)

    @override
    def _list_drafted(self) -> list[int]:
        return self._token_ids

    @override
    def _list_proposals(self) -> list[Proposal]:
        return self._proposals

    @override
    def use(self, answer: Answer) -> None:
        self._num_seen = 1 + len(self._token_ids)
        super().use(answer)
        self._go_on()
