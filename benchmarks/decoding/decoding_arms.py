"""The arms that `decode.py` compares: ways to decode on KV that is there already."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import torch

from benchmarks.engine.filled import FilledEngine, Model, rewind, say
from rapid.engines.local_ports import EngineDrafter, EngineVerifier
from rapid.messages import Verdict
from rapid.speculation.loop import speculate

ALPHA, MAX_DRAFT = 0.8, 8

Arm = Callable[[], Awaitable["Run"]]


class Run:
    """One arm of one repetition.

    Attributes:
        ms: Wall milliseconds of a step that gives every sequence one token.
        cpu_ms: The same in processor time of the whole process.
        token_ids: Tokens of the first sequence.
        verdicts: Verdicts of all sequences; empty for `generate`.
    """

    def __init__(
        self, ms: float, cpu_ms: float, token_ids: list[int], verdicts: list[Verdict] | None = None
    ) -> None:
        self.ms, self.cpu_ms, self.token_ids = ms, cpu_ms, token_ids
        self.verdicts = verdicts or []


class Stopwatch:
    """A streamer that records when tokens arrive and how many."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float, int]] = []

    def put(self, token_ids: torch.Tensor) -> None:
        """Record the prompt, then each token (or block) of all sequences."""
        self.seen.append((time.perf_counter(), time.process_time(), token_ids.shape[-1]))

    def end(self) -> None:
        """Do nothing: there is nothing to flush."""

    def per_token_ms(self, is_batch: bool) -> tuple[float, float]:
        """Return wall and processor milliseconds per token after the first token or block."""
        (wall, cpu, _), (last_wall, last_cpu, _) = self.seen[1], self.seen[-1]
        count = sum(1 if is_batch else n for *_, n in self.seen[2:])
        return 1e3 * (last_wall - wall) / count, 1e3 * (last_cpu - cpu) / count


def plain(filled: FilledEngine, num_tokens: int) -> Arm:
    """Decode all leases at once with our engine, timed after the first token as `generate` is."""

    async def decoded(count: int) -> list[Verdict]:
        engine = filled.engine
        return await asyncio.gather(*(engine.decode(one, 0, count) for one in filled.lease_ids))

    async def run() -> Run:
        await filled.rewind()
        first = await decoded(1)
        began, cpu = time.perf_counter(), time.process_time()
        others = await decoded(num_tokens - 1)
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        token_ids = [*first[0].token_ids, *others[0].token_ids]
        return Run(1e3 * wall / (num_tokens - 1), 1e3 * cpu / (num_tokens - 1), token_ids)

    return run


def generated(model: Model, filled: FilledEngine, cache: Any, num_tokens: int, **more: Any) -> Arm:
    """Run `generate` on the cache, which is taken back to its length before every run.

    Without a cache, `generate` reads the prompt itself.
    """
    prompts = torch.from_numpy(filled.prompts)

    def generate() -> Run:
        if cache is not None:
            rewind(cache, filled.length - 1)
        watch = Stopwatch()
        with torch.inference_mode():
            output = model.theirs.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                past_key_values=cache,
                max_new_tokens=num_tokens,
                do_sample=False,
                streamer=watch,
                **more,
            )
        return Run(*watch.per_token_ms(len(prompts) > 1), output[0, filled.length :].tolist())

    return functools.partial(filled.on_its_thread, generate)


def lossless(target: FilledEngine, drafter: FilledEngine, num_tokens: int) -> Arm:
    """Run rounds of all leases side by side, as `rapid.generate` and the server do."""

    async def one(lease_id: str) -> list[Verdict]:
        rounds = speculate(
            EngineDrafter(drafter.engine, lease_id),
            EngineVerifier(target.engine, lease_id),
            max_tokens=num_tokens,
            max_draft=MAX_DRAFT,
        )
        return [verdict async for verdict in rounds]

    async def run() -> Run:
        await target.rewind()
        await drafter.rewind()
        began, cpu = time.perf_counter(), time.process_time()
        answers = await asyncio.gather(*(one(lease_id) for lease_id in target.lease_ids))
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        token_ids = [token for verdict in answers[0] for token in verdict.token_ids]
        verdicts = [verdict for answer in answers for verdict in answer]
        return Run(1e3 * wall / num_tokens, 1e3 * cpu / num_tokens, token_ids, verdicts)

    return run


def scripts(num_tokens: int, vocab_size: int, alpha: float = ALPHA) -> tuple[list[int], list[int]]:
    """Return the target's answer, and a drafter's that is right with probability alpha."""
    rng = np.random.default_rng(2)
    right = rng.integers(10, vocab_size, num_tokens)
    is_right = rng.random(num_tokens) < alpha
    return right.tolist(), np.where(is_right, right, (right + 1) % vocab_size).tolist()


def follow(model: Any, length: int, token_ids: list[int]) -> None:
    """Make a transformers model follow a script (`filled.scripted` does so for an engine)."""
    script = torch.tensor(token_ids)

    def raise_logits(_: Any, __: Any, inputs: dict[str, Any], output: Any) -> None:
        last = int(inputs["past_key_values"].get_seq_length()) - length
        rows = output.logits[0]
        first = last - len(rows) + 1
        if first >= 0:
            say(script[first : last + 1], rows)

    model.register_forward_hook(raise_logits, with_kwargs=True)


def assisted(
    target: Model,
    drafter: Model,
    long: FilledEngine,
    right: list[int],
    drafted: list[int],
    num_tokens: int,
) -> Arm:
    """Run `generate` with the drafter as its assistant, with equally many tokens per block.

    It takes no filled cache (its first forward reads the whole prompt whatever the cache holds), so
    both models read the prompt before the clock starts.
    """
    follow(target.theirs, long.length, right)
    follow(drafter.theirs, long.length, drafted)
    settings = drafter.theirs.generation_config
    settings.num_assistant_tokens = MAX_DRAFT
    settings.num_assistant_tokens_schedule = "constant"
    settings.assistant_confidence_threshold = 0.0
    return generated(target, long, None, num_tokens, assistant_model=drafter.theirs)
