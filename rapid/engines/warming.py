"""Warms an engine: it decodes a few tokens and reads a whole chunk before it takes requests.

The first forward compiles kernels and allocates workspaces, and the watchdog needs measured costs.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from rapid.config import EngineConfig, SamplingConfig, SpeculationConfig
from rapid.engines.engine import Engine
from rapid.messages import LeaseRequest, as_prompt

_NUM_DECODED = 8  # the first of them are slower than the rest


def warm_up(engine: Engine, config: EngineConfig) -> Engine:
    """Return the engine once it knows what its steps cost; the call blocks until then."""
    with ThreadPoolExecutor(1) as executor:  # the caller's event loop may be running
        executor.submit(asyncio.run, _warm_up(engine, config.step_tokens)).result()
    return engine


async def _warm_up(engine: Engine, step_tokens: int) -> None:
    """Read a prompt of as many tokens as a step takes, then decode after one of a token."""
    # In this order, as a chunk whose cost is not known is read whole, whatever decodes beside.
    chunk = max(1, min(step_tokens, engine.status().max_context - 2 * _NUM_DECODED))
    await _run(engine, "warm-up/reading", chunk + 1)  # the last token is not read by prefill
    await _run(engine, "warm-up/decoding", 1)


async def _run(engine: Engine, lease_id: str, num_tokens: int) -> None:
    prompt = as_prompt([0] * num_tokens)
    sampling, method = SamplingConfig(temperature=0.0), SpeculationConfig(max_draft=1)
    await engine.open(LeaseRequest(lease_id, "", prompt, _NUM_DECODED, sampling, method))
    try:
        await engine.prefill(lease_id)
        await engine.decode(lease_id, 0, _NUM_DECODED)
    finally:
        engine.release(lease_id)
