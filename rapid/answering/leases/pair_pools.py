"""The pools of a pair of models."""

from __future__ import annotations

from dataclasses import dataclass

from rapid.answering.leases.session import Role
from rapid.answering.leases.sources import Drafts
from rapid.config import OwnDrafting
from rapid.ports import EnginePool


@dataclass(frozen=True, slots=True)
class Pools:
    """The pools in which the leases of all requests are taken.

    Attributes:
        target: Engines that read the full chat.
        drafter: Engines that draft, `target` where the target drafts for itself; or the settings of
            a drafter without engines, for which nothing is retrieved.
        alone: Engines that answer in `rag`: the drafter's, but a loss of theirs counts as a loss of
            the target, because no other model can continue the answer. The target's if it has none.
        max_context: Longest prompt plus answer on an engine of each role, in tokens.
        vllm_drafts: Whether vLLM computes the drafter's engines.
    """

    target: EnginePool
    drafter: Drafts
    alone: EnginePool
    max_context: dict[Role, int]
    vllm_drafts: bool = False

    @property
    def own_drafting(self) -> OwnDrafting | None:
        """Settings of the drafter if it has no engines."""
        return self.drafter if isinstance(self.drafter, OwnDrafting) else None
