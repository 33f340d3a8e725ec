"""A vLLM with its own names, types and checks as far as they are used, over toy models.

Its samplers do what vLLM 0.33.0's do, with ties kept by `top_k`. `install` makes it importable.
"""

from __future__ import annotations

import asyncio
import enum
import sys
import types
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pytest

Logits = Callable[[Sequence[int]], Any]


class RequestOutputKind(enum.Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class SamplingParams:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    logprobs: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    logit_bias: dict[int, float] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE


class TokensPrompt(TypedDict, total=False):
    prompt_token_ids: list[int]
    cache_salt: str


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    index: int
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None


@dataclass
class RequestOutput:
    request_id: str
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None


@dataclass
class AsyncEngineArgs:
    model: str
    dtype: str = "auto"
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    distributed_executor_backend: str | None = None
    quantization: str | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool | None = None
    logprobs_mode: str = "raw_logprobs"
    max_logprobs: int = 20
    generation_config: str = "auto"
    seed: int = 0
    disable_log_stats: bool = False


@dataclass
class AsyncLLMEngine:
    """The engine; `asked` are its requests, and each waits for `gate` if there is one."""

    args: AsyncEngineArgs
    logits: Logits
    vocab: int
    asked: list[tuple[TokensPrompt, SamplingParams]] = field(default_factory=list)
    is_asked: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: list[str] = field(default_factory=list)
    gate: asyncio.Event | None = None
    fail: Exception | None = None
    errored: bool = False
    is_shut: bool = False

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.args.seed)
        self.model_config = types.SimpleNamespace(get_vocab_size=lambda: self.vocab)

    def shutdown(self) -> None:
        self.is_shut = True

    async def generate(
        self, prompt: TokensPrompt, sampling_params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        asked, ids = sampling_params, prompt["prompt_token_ids"]
        if self.errored:
            raise RuntimeError("EngineDeadError")
        assert asked.logprobs is None or asked.logprobs <= self.args.max_logprobs
        assert asked.output_kind is RequestOutputKind.FINAL_ONLY
        assert self.args.max_model_len is not None
        assert len(ids) < self.args.max_model_len
        self.asked.append((prompt, asked))
        self.is_asked.set()
        try:
            if self.gate is not None:
                await self.gate.wait()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.aborted.append(request_id)
            raise
        if self.fail is not None:
            raise self.fail
        drawn: list[int] = []
        told: list[dict[int, Logprob]] = []
        while len(drawn) < (asked.max_tokens or 0):
            token, logprobs = self._draw([*ids, *drawn], asked)
            drawn.append(token)
            told.append(logprobs)
            if token in (asked.stop_token_ids or ()):
                break
        output = CompletionOutput(0, drawn, told if asked.logprobs is not None else None, "stop")
        yield RequestOutput(request_id, [output], True, num_cached_tokens=len(ids) // 2)

    def _draw(self, ids: list[int], asked: SamplingParams) -> tuple[int, dict[int, Logprob]]:
        logits = np.asarray(self.logits(ids), dtype=np.float32).copy()
        for token, bias in (asked.logit_bias or {}).items():
            logits[token] += bias
        if asked.temperature > 0:
            logits /= np.float32(asked.temperature)
            logits[np.exp(logits - logits.max()) < asked.min_p] = -np.inf
            if 0 < asked.top_k < len(logits):
                logits[logits < np.sort(logits)[-asked.top_k]] = -np.inf
            order = np.argsort(-logits, kind="stable")
            mass = np.exp(log_softmax(logits)[order].astype(np.float64)).cumsum()
            logits[order[1:][mass[:-1] >= asked.top_p]] = -np.inf
        logprobs = log_softmax(logits)
        token = int(logits.argmax())
        if asked.temperature > 0:
            token = int((logprobs + self.random.gumbel(size=len(logits))).argmax())
        kept = np.argsort(-logprobs, kind="stable")[: asked.logprobs or 0].tolist()
        return token, {each: Logprob(float(logprobs[each])) for each in (token, *kept)}


def log_softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    shifted = logits - logits.max()
    result: np.ndarray[Any, Any] = shifted - np.log(np.exp(shifted).sum(dtype=np.float32))
    return result


def install(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    logits: Logits | None = None,
    *,
    vocab: int = 0,
    version: str = "0.33.0",
) -> None:
    """Make a vLLM of a version importable, with a model if one is given."""
    found = folder / f"vllm-{version}.dist-info"
    found.mkdir()
    (found / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    monkeypatch.syspath_prepend(folder)
    engine = types.SimpleNamespace(
        from_engine_args=lambda args: AsyncLLMEngine(args, logits, vocab)  # type: ignore[arg-type]
    )
    module: Any = types.ModuleType("vllm")
    module.AsyncEngineArgs, module.AsyncLLMEngine = AsyncEngineArgs, engine
    module.SamplingParams, module.TokensPrompt = SamplingParams, TokensPrompt
    module.sampling_params = types.ModuleType("vllm.sampling_params")
    module.sampling_params.RequestOutputKind = RequestOutputKind
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", module.sampling_params)
