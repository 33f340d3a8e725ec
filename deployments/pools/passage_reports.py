"""What an orchestrator's process says of how its drafter reads passages, to whoever asks the actor.

Each replica measures its pair by itself (`rapid.answering.passage_gate`), so that each is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # an ingress has no use for what the gate imports
    from rapid.answering.passage_gate import PassageGate

_gates: list[PassageGate] = []  # one, in a process that answers questions


def keep_gate(gate: PassageGate) -> None:
    """Have this process tell of a gate from now on."""
    _gates[:] = [gate]


def report_passages(_: Any = None) -> dict[str, str]:
    """Return ``reading``, which is apart or together, and why; nothing where none are kept."""
    gate = _gates[0] if _gates else None
    if gate is None or not gate.is_wanted:
        return {}
    return {"reading": "apart" if gate.is_open else "together", "reason": gate.reason}
