"""Our engine and Hugging Face's caches over the same weights and the same KV, without a prefill.

Reading 64K tokens takes minutes on two cores and is no part of decoding. So the KV of the prompt is
drawn at random and put where a prefill would have left it, with the same numbers on both sides. A
step then reads and computes as much as after a prefill, and both sides must generate the same
tokens.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from rapid.config import EngineConfig, SamplingConfig, SpeculationConfig
from rapid.engines.attention import ragged as attention
from rapid.engines.attention.batch import Feed
from rapid.engines.engine import Engine
from rapid.engines.forward.weights.loading import LoadedModel, load_model
from rapid.engines.kv.cache import KVLayout
from rapid.engines.kv.leases.lease import Lease
from rapid.engines.work.base import Work
from rapid.messages import LeaseRequest, Terms, as_prompt

CPU = torch.device("cpu")
AnyCache = TypeVar("AnyCache", bound=Cache)
Result = TypeVar("Result")
Run = Callable[[Sequence[Feed]], list[torch.Tensor]]
SMOLLM2_SHAPE = {"hidden_size": 576, "num_layers": 30, "num_heads": 9, "num_kv_heads": 3}
KV = list[tuple[torch.Tensor, torch.Tensor]]  # per layer keys and values [batch, kv_heads, n, d]


@dataclass(frozen=True)
class Model:
    """One set of weights in two forms: for engines, and for `generate`."""

    ours: LoadedModel
    theirs: LlamaForCausalLM


def random_model(
    dtype: str,
    *,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    vocab_size: int = 4096,
) -> Model:
    """Return a Llama with heads of 64 and random weights that never ends an answer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=64,
        max_position_embeddings=2**20,  # rotations are computed, so it costs nothing
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with_ours = LlamaForCausalLM._from_config(
        copy.deepcopy(config), attn_implementation=attention.NAME, dtype=getattr(torch, dtype)
    )
    ours = LoadedModel(
        config=EngineConfig(model="random", dtype=dtype),
        model=with_ours.eval().requires_grad_(False),
        tokenizer=None,
        eos_ids=frozenset(),
        vocab_size=vocab_size,
        embedding_rows=vocab_size,
        max_context=config.max_position_embeddings,
        device=CPU,
        dtype=getattr(torch, dtype),
        kv_layout=KVLayout(num_kv_heads, 64, getattr(torch, dtype), (CPU,) * num_layers),
    )
    return Model(ours, _twin(ours))


def embedded_target(dtype: str) -> Model:
    """Return the repository's trained target, which goes on after its end-of-sequence token."""
    loaded = load_model(EngineConfig(model="embedded:target", dtype=dtype, device="cpu"))
    ours = replace(loaded, eos_ids=frozenset())
    return Model(ours, _twin(ours))


def _twin(ours: LoadedModel) -> LlamaForCausalLM:
    """Return the library's model on the same weight tensors, with a config of its own to modify."""
    config = copy.deepcopy(ours.model.config)
    theirs = LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=ours.dtype)
    theirs.load_state_dict(ours.model.state_dict(), assign=True)
    theirs.tie_weights()
    theirs.generation_config.eos_token_id = None
    theirs.generation_config.pad_token_id = 0
    return theirs.eval().requires_grad_(False)


class FilledEngine:
    """An engine with `batch` leases whose prompts of `length` tokens count as read."""

    def __init__(
        self,
        loaded: LoadedModel,
        length: int,
        *,
        batch: int = 1,
        room: int = 128,
        max_draft: int = 1,
        threads: int = 1,
        draft_ahead: bool = False,
        shared: int = 0,
    ) -> None:
        """Make the engine; the prompts share their first `shared` tokens, and so the KV of them."""
        self.length = length
        self.prompts = np.random.default_rng(0).integers(10, loaded.vocab_size, (batch, length))
        self.prompts[:, :shared] = self.prompts[0, :shared]
        self.lease_ids = [str(index) for index in range(batch)]
        self._room, self._max_draft = room, max_draft
        most = length + room + max_draft
        pages = -(-most // loaded.config.page_tokens)
        config = {
            "max_context": most,
            "kv_cache_tokens": batch * pages * loaded.config.page_tokens,
            "max_leases": batch,
            "threads": threads,
            "draft_ahead": draft_ahead,
            "lease_ttl_s": 3600,
        }
        self.engine = Engine(loaded, loaded.config.model_copy(update=config))
        self._run = self.engine._compute.runner.run  # without a script
        torch.manual_seed(1)
        for layer in self.engine._compute.runner.cache.layers:
            for tensor in layer:
                tensor.normal_()

    async def open(self) -> None:
        """Take the leases."""
        for lease_id, prompt in zip(self.lease_ids, self.prompts, strict=True):
            request = LeaseRequest(
                lease_id,
                Terms(
                    "local",
                    SamplingConfig(temperature=0),
                    SpeculationConfig(eta=0, max_draft=self._max_draft),
                    self._room,
                ),
                as_prompt(prompt.tolist()),
            )
            await self.engine.open(request)
        ledger = self.engine._state.ledger
        self._digests = {each: ledger.get(each).sequences[0].digest for each in self.lease_ids}
        await self.rewind()

    async def rewind(self) -> None:
        """Forget the answers, as after a prefill, which leaves its last token to compute."""
        for lease_id in self.lease_ids:
            await self._call(lease_id, (0,), functools.partial(self._forget, lease_id))

    def _forget(self, lease_id: str) -> None:
        sequence = self.engine._state.ledger.get(lease_id).sequences[0]
        sequence.drop_speculation()
        del sequence.token_ids[self.length :]
        sequence.digest = self._digests[lease_id]
        sequence.num_computed = self.length - 1

    def kv(self) -> KV:
        """Return a copy of the prompts' KV in the library's layout."""
        leases = [self.engine._state.ledger.get(lease_id) for lease_id in self.lease_ids]
        spans = [lease.sequences[0].table.spans(0, self.length - 1) for lease in leases]

        def of_layer(tensor: torch.Tensor) -> torch.Tensor:
            of_lease = [torch.cat([tensor[:, a:b] for a, b in one], dim=1) for one in spans]
            return torch.stack(of_lease)

        layers = self.engine._compute.runner.cache.layers
        return [(of_layer(keys), of_layer(values)) for keys, values in layers]

    async def on_its_thread(self, function: Callable[[], Result]) -> Result:
        """Call a function on the thread on which the engine computes.

        OpenMP keeps a team of threads for every thread that computes in parallel. Two teams on the
        same cores make each other sleep and wake at every operation, which costs a step of a small
        model more than half its time. So everything that is compared shares the engine's team.
        """
        return await self._call(self.lease_ids[0], (), function)

    async def _call(
        self, lease_id: str, choices: tuple[int, ...], function: Callable[[], Result]
    ) -> Result:
        return await self.engine._call(
            lease_id, lambda lease: _Call(lease, choices, function), object
        )

    def script(self, token_ids: Sequence[int]) -> None:
        """Make the model generate these tokens from now on, whatever it computes (`scripted`)."""
        runner = self.engine._compute.runner
        runner.run = scripted(self._run, self.length, token_ids)  # type: ignore[method-assign]

    def close(self) -> None:
        """End the engine."""
        self.engine.close()


class _Call(Work):
    """Work that needs no rows and is done when it has begun."""

    def __init__(
        self, lease: Lease, choices: tuple[int, ...], function: Callable[[], object]
    ) -> None:
        super().__init__(lease, choices)
        self._function = function

    def begin(self) -> None:
        super().begin()
        self.finish(self._function())

    def feeds(self, limit: int) -> list[Feed]:
        raise NotImplementedError

    def take(self, logits: torch.Tensor) -> None:
        raise NotImplementedError


def scripted(run: Run, length: int, token_ids: Sequence[int]) -> Run:
    """Return `Runner.run` with the logits raised so that a given answer is the likeliest.

    Acceptance is synthetic: a drafter whose script agrees with the target's at a share alpha of the
    positions, drawn beforehand, is accepted with probability alpha at each. Everything else is
    real: forwards, proposals, judging, and the KV that is kept.
    """
    answer = torch.tensor(token_ids)

    def run_script(feeds: Sequence[Feed]) -> list[torch.Tensor]:
        logits = run(feeds)
        for feed, rows in zip(feeds, logits, strict=True):
            last = feed.position + len(feed.token_ids) - length
            say(answer[last - len(rows) + 1 : last + 1], rows)
        return logits

    return run_script


@torch.inference_mode()
def say(token_ids: torch.Tensor, logits: torch.Tensor) -> None:
    """Make these tokens the likeliest of their rows, by a margin larger than any rounding."""
    logits.scatter_(-1, token_ids[:, None], logits.amax(-1, keepdim=True) + 5)


def dynamic_cache(model: Model, kv: KV) -> DynamicCache:
    """Return the kind of cache that `generate` uses by default, filled with `kv`."""
    return _filled(DynamicCache(config=model.theirs.config), kv)


def static_cache(model: Model, kv: KV, room: int) -> StaticCache:
    """Return a cache filled with `kv`, allocated once for exactly this prompt and answer."""
    length = kv[0][0].shape[2]
    return _filled(StaticCache(config=model.theirs.config, max_cache_len=length + room), kv)


def _filled(cache: AnyCache, kv: KV) -> AnyCache:
    for index, (keys, values) in enumerate(kv):
        cache.update(keys, values, index)
    return cache


def rewind(cache: Cache, length: int) -> None:
    """Take the cache back to `length` tokens."""
    for layer in cache.layers:
        if isinstance(cache, StaticCache):
            layer.cumulative_length.fill_(length)
        else:
            layer.crop(length - layer.get_seq_length())
