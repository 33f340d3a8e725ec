"""Whether an orchestrator's drafter reads retrieved passages apart or together, for ``GET /ready``.

Each replica of the orchestrator measures its pair of models (`rapid.answering.passage_gate`). The
ingress asks each of them by calling `report_passages` in its process.
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
