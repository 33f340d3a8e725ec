"""What all requests of a process share."""

from __future__ import annotations

from dataclasses import dataclass, field

from rapid.answering.leases.pair_pools import Pools
from rapid.answering.passage_gate import PassageGate
from rapid.answering.prompt.prompting import RequestPrompts
from rapid.config import AnsweringConfig, SpeculationConfig
from rapid.estimators import Patience
from rapid.speculation.pace.round_costs import RoundCosts


@dataclass(frozen=True, slots=True)
class Services:
    """The settings, pools and measurements that all requests of a process share.

    Attributes:
        costs: What the rounds of drafter models cost and bring, and the plain ones.
        text_costs: The same of drafts that are copied from the text.
    """

    config: AnsweringConfig
    speculation: SpeculationConfig
    pools: Pools
    prompts: RequestPrompts
    patience: Patience
    costs: RoundCosts = field(default_factory=RoundCosts)
    text_costs: RoundCosts = field(default_factory=RoundCosts)
    gate: PassageGate = field(default_factory=PassageGate)
