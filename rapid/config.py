"""Immutable settings of the method and of engines, validated for unknown keys and ranges."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from rapid.transfers import is_known

Mode = Literal["plain", "lossless", "fused", "paper", "rag", "auto"]
TooLong = Literal["refuse", "rag", "sections"]
Coupling = Literal["maximal", "shared_noise"]
Rule = Literal["exact", "paper"]
Contract = Literal["target", "fused", "paper", "drafter"]
KVCacheDtype = Literal["auto", "fp8"]


def _check_transfer(name: str) -> str:
    if not is_known(name):
        raise PydanticCustomError(
            "unknown_transfer",
            "must be 'distill', 'boost', 'adaptive' or 'mixture', or a name that this process gave "
            "rapid.register_transfer, as rapid.open and 'rapid eval --rules' allow and servers "
            "do not",
        )
    return name


KnownTransfer = Annotated[str, AfterValidator(_check_transfer)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0)]

MAX_DRAFT = 64  # longest draft block that a request may ask for
LEAST_TEMPERATURE = 1e-5  # dividing logits by less leaves only the best token, or overflows
PAPER = {"transfer": "distill", "coupling": "maximal", "draft_top_k": None}  # reference code


class Frozen(BaseModel):
    """Base of all settings: immutable, without unknown keys, and with input hidden in errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class ThinkingRule(Frozen):
    """What holds for the thinking before an answer.

    Attributes:
        opening: The token that opens it, which may only be the first one.
        closing: The token behind which the answer begins.
        is_open: Whether the prompt has opened it.
        budget: Most tokens between the two, behind which the closing one comes; 0 for no thinking,
            None for any number.
    """

    opening: TokenId
    closing: TokenId
    is_open: bool = False
    budget: int | None = Field(None, ge=0)


class SamplingConfig(Frozen):
    """Sampling parameters of a request.

    Attributes:
        temperature: Divisor of the logits; 0 is greedy, and values below 1e-5 are treated as 0.
        top_p: Nucleus mass that is kept, in (0, 1].
        top_k: Number of best tokens that are kept; None keeps all.
        seed: Key of all random numbers of the request.
        logit_bias: Pairs of a token id and what is added to its logit, on every model alike.
        presence_penalty: What is subtracted from the logits of tokens that the answer has.
        frequency_penalty: What is subtracted as often as the answer has the token.
        min_tokens: Tokens before which no answer ends.
        allowed_token_ids: The only tokens that answers have; none for all.
        repetition_penalty: What divides positive logits of tokens that the prompt of the model that
            answers or the answer has, and multiplies negative ones; 1 changes nothing.
        min_p: Tokens below this share of the best one's probability are dropped, before `top_k`.
        bad_words: Token ids that no answer has one after another.
        stop_token_ids: Tokens that end an answer, beside those of the model.
        ignore_eos: Whether the model's own tokens end nothing.
        grammar: What every answer follows, as `rapid.constraints.structured_outputs` compiles it.
        thinking: What holds before that, where something does.
    """

    temperature: Finite = Field(1.0, ge=0, le=2)
    top_p: Finite = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=1)
    seed: int = Field(0, ge=-(2**63), le=2**63 - 1)
    logit_bias: tuple[tuple[TokenId, Finite], ...] = ()
    presence_penalty: Finite = Field(0.0, ge=-2, le=2)
    frequency_penalty: Finite = Field(0.0, ge=-2, le=2)
    min_tokens: int = Field(0, ge=0)
    allowed_token_ids: tuple[TokenId, ...] = ()
    repetition_penalty: Finite = Field(1.0, gt=0, le=100)
    min_p: Finite = Field(0.0, ge=0, le=1)
    bad_words: tuple[tuple[TokenId, ...], ...] = ()
    stop_token_ids: tuple[TokenId, ...] = ()
    ignore_eos: bool = False
    grammar: str | None = None
    thinking: ThinkingRule | None = None

    def name_tokens(self) -> Iterator[tuple[str, int]]:
        """Yield each token id that a setting names, after that setting's name."""
        yield from (("logit_bias", token) for token, _ in self.logit_bias)
        yield from (("allowed_token_ids", token) for token in self.allowed_token_ids)
        yield from (("stop_token_ids", token) for token in self.stop_token_ids)

    @property
    def follows_answer(self) -> bool:
        """Whether logits are changed by the answer's tokens, as by penalties or a grammar."""
        counts = self.presence_penalty or self.frequency_penalty or self.min_tokens
        says = self.repetition_penalty != 1 or self.bad_words
        return bool(counts or says or self.grammar is not None or self.thinking)

    def ends(self, eos_ids: Set[int]) -> Set[int]:
        """Return the tokens that end an answer, of a model with these."""
        return (frozenset() if self.ignore_eos else eos_ids) | frozenset(self.stop_token_ids)

    @field_validator("temperature")
    @classmethod
    def _least_is_greedy(cls, temperature: float) -> float:
        return 0.0 if temperature < LEAST_TEMPERATURE else temperature


class SpeculationConfig(Frozen):
    """Settings of the speculation method (``docs/algorithm.md`` defines the symbols).

    Attributes:
        transfer: How the drafter's distribution moves the target's: `distill`, `boost`,
            `adaptive`, a mixture whose weight follows the committed text, `mixture`, the
            speculative ensemble of both distributions, or a rule of this process
            (`rapid.register_transfer`).
        eta: Strength of the move; 0 samples the target's own distribution. Under `adaptive` it
            sharpens what is sampled, and changes no greedy answer unless it is 0. For `mixture` it
            is the drafter's weight, and the target's is 1.
        max_draft: Tokens requested from the drafter per block (gamma).
        coupling: How draft and result share randomness.
        plausibility: Only tokens whose draft probability is at least this share of the best one's
            are moved; a `mixture` has no such limit.
        draft_top_k: Number of best tokens that the drafter's proposal keeps; None keeps all.
        transfer_temperature: Temperature of the distributions when the request is greedy.
        rule: `exact` samples the distribution that the contract names. `paper` is the rule of the
            reference code, which samples neither p nor p_hat; it exists to reproduce the paper's
            tables. `paper` fixes `transfer`, `coupling` and `draft_top_k`: they default to its
            values, and other values are rejected.
    """

    transfer: KnownTransfer = "adaptive"
    eta: Finite = Field(10.0, ge=0, le=1000)
    max_draft: int = Field(10, ge=1, le=MAX_DRAFT)
    coupling: Coupling = "maximal"
    plausibility: Finite = Field(0.1, ge=0, le=1)
    draft_top_k: int | None = Field(64, ge=1)
    transfer_temperature: Finite = Field(1.0, ge=LEAST_TEMPERATURE, le=2)
    rule: Rule = "exact"

    @property
    def is_witnessed(self) -> bool:
        """Whether blocks are judged with the target's own reading of the retrieved text as well."""
        return self.transfer == "adaptive" and self.eta > 0

    @model_validator(mode="before")
    @classmethod
    def _paper_has_its_own_defaults(cls, settings: Any) -> Any:
        if isinstance(settings, dict) and settings.get("rule") == "paper":
            return PAPER | settings
        return settings

    @model_validator(mode="after")
    def _paper_has_no_variants(self) -> Self:
        for name, value in PAPER.items():
            if self.rule == "paper" and getattr(self, name) != value:
                raise ValueError(
                    f"rule 'paper' is the reference code's, with {name} {value!r}: leave {name} "
                    "out, or take rule 'exact'"
                )
        return self


class PromptLookup(Frozen):
    """Drafting without a model, by copying what followed the same tokens earlier in the text."""

    name: ClassVar[Literal["prompt lookup"]] = "prompt lookup"


class WindowDrafting(Frozen):
    """Self-drafting by the target on a part of its own KV (MagicDec, arXiv 2408.11049).

    Attributes:
        num_sinks: Tokens at the start of the prompt that every drafted row attends to.
        window: Latest tokens that a drafted row attends to, including itself. The RAPID paper
            (arXiv 2502.20330) runs this baseline with 4 sinks and 4096 tokens of KV.
    """

    name: ClassVar[Literal["KV window"]] = "KV window"
    num_sinks: int = Field(4, ge=0)
    window: int = Field(512, ge=1)


OwnDrafting = PromptLookup | WindowDrafting
"""Settings of a drafter that reads nothing but the target's own prompt.

Nothing is retrieved for it, and eta is 0. Receipts, metrics and refusals call it by its `name`.
"""
ServedDrafting = Literal["prompt_lookup"]
SERVED_DRAFTINGS: dict[ServedDrafting, OwnDrafting] = {"prompt_lookup": PromptLookup()}
"""Those that servers have, by what their configuration calls them."""


class AnsweringConfig(Frozen):
    """Settings of request handling, independent of where the engines run.

    Attributes:
        draft_length: `measured` chooses the draft length, up to `max_draft`, that is fastest by
            measured times and acceptance, and decodes plainly where that is faster and the
            contract allows it. `fixed` always drafts `max_draft` tokens, for measurements that
            compare at one length.
        target_wait_s: Longest wait for a target lease, in seconds; after it the request is refused
            with status 503.
        drafter_wait_s: Longest wait for a drafter lease, in seconds; after it `auto` and `lossless`
            continue without a drafter.
        drafter_hangs_s: Longest wait for a round with the drafter or, while it reads, for one more
            token of its prompt, in seconds, raised to ten times the longest recent round where that
            is more. After it the drafter counts as lost even if it is alive.
        target_hangs_s: Longest wait for a sign of life, in seconds, from the engine that verifies
            and has not answered a call for two seconds. After it the answer continues on another
            engine.
        default_max_tokens: Answer length when the request names none, cut to what fits.
        answerable_log_odds: Least log odds, yes against no, with which the drafter must say that
            what was retrieved answers the question, for `auto` to be `fused`. It is asked for one
            word before it drafts. None does not ask: a small model cannot tell.
    """

    draft_length: Literal["measured", "fixed"] = "measured"
    target_wait_s: Finite = Field(30.0, gt=0)
    drafter_wait_s: Finite = Field(5.0, gt=0)
    drafter_hangs_s: Finite = Field(30.0, gt=0)
    target_hangs_s: Finite = Field(10.0, gt=0)
    default_max_tokens: int = Field(512, ge=1)
    answerable_log_odds: Finite | None = None


class EngineConfig(Frozen):
    """Settings of one engine: its model and the memory for its sequences.

    Attributes:
        model: A checkpoint directory, a GGUF file (``*.gguf``), a hub name, a name that
            ``rapid models list`` shows, ``embedded:target`` or ``embedded:drafter``.
        dtype: Data type of weights, and of KV unless `kv_cache_dtype` is set; ``auto`` is bfloat16
            on CUDA and float32 on a CPU.
        device: ``cpu``, ``cuda`` or an index such as ``cuda:1``. ``auto`` takes CUDA when present;
            ``balanced`` spreads the layers with accelerate, which computes them in turn.
        tensor_parallel: Processes that compute every layer together, each with its share of the
            heads, on a device of its own: as many GPUs, of one machine or (`pool.nodes`) of
            several, or one CPU. Heads, KV heads and the MLP must be divisible by it.
        rope_scaling: Override of the checkpoint's RoPE scaling, for example YaRN for Qwen2.5 beyond
            32K.
        quantization: Quantization of the weights at load time: ``int4``, ``int8`` (on a CPU) or
            ``fp8`` (on a GPU), computed by our own decoder; or the `quantization_config` of
            transformers, for example ``load_in_4bit: true`` (bitsandbytes), computed by its. A
            checkpoint stored quantized needs no setting.
        max_context: Longest prompt plus answer of one sequence, in tokens; None takes the model's.
        kv_cache_dtype: ``auto`` keeps keys and values in `dtype`; ``fp8`` (e4m3) in eight bits,
            which changes answers and holds twice the tokens of bfloat16 in the same memory.
        kv_cache_tokens: Size of the KV pool, in tokens, shared by all sequences.
        host_cache_tokens: Size, in tokens, of the cache in host memory for the KV of prompts that
            were evicted from the pool. Long documents are restored from it instead of being
            prefilled again, unless that was measured to be slower. 0 disables it.
        passage_cache_tokens: Size, in tokens, of the cache in host memory for the KV of retrieved
            passages, each of which a drafter then reads once, by itself, for answers that are the
            target's own (``docs/decisions/chunk-kv.md``). For drafters that read thousands of
            retrieved tokens. 0 reads passages together.
        passage_cache_bits: Bits of each number in that cache, 8 or 4, so that the same memory holds
            about twice or four times as many tokens, which a drafter reads a little worse. None
            keeps `dtype`.
        disk_cache_folder: Folder on a local disk in which the KV of prompts is kept, also over
            restarts, in a folder for each tenant. It passes through the host cache. None keeps
            nothing on disk.
        disk_cache_gib: Most GiB of all files in that folder; those used longest ago give way.
        page_tokens: Tokens per KV page.
        max_leases: Requests held at once, each with all its choices.
        step_tokens: Token budget of one forward pass; prefill chunks are cut to it.
        prefill_slowdown: Factor by which prefill may lengthen the time per token of other
            sequences, as measured while the engine runs. With 2 it at most doubles, on average over
            a few steps, and a long prompt gets at best half of the time. For a tenant that asks
            after a pause others may rest for a quarter of a second at once.
        draft_ahead: Whether drafting continues while a block is judged, on the assumption that the
            block is accepted; meant for a drafter whose engine has a process of its own.
        deterministic: Whether every position is computed in a place and a shape of its own, so that
            the text is bit-identical whatever else runs, in any dtype
            (`rapid.engines.forward.tiles`). Slower, as sequences are computed one after the other.
        lease_ttl_s: Seconds after which a lease that is neither stepped nor renewed is freed; one
            that is held in the engine's own process lasts until it is released.
        threads: Compute threads of torch on a CPU; None keeps torch's default.
    """

    model: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    tensor_parallel: int = Field(1, ge=1, le=64)
    rope_scaling: dict[str, object] | None = None
    quantization: Literal["fp8", "int4", "int8"] | dict[str, object] | None = None
    max_context: int | None = Field(None, ge=16)
    kv_cache_dtype: KVCacheDtype = "auto"
    kv_cache_tokens: int = Field(32768, ge=16)
    host_cache_tokens: int = Field(0, ge=0)
    passage_cache_tokens: int = Field(0, ge=0)
    passage_cache_bits: Literal[4, 8] | None = None
    disk_cache_folder: str | None = Field(None, min_length=1)
    disk_cache_gib: Finite | None = Field(None, gt=0)
    page_tokens: int = Field(16, ge=1, le=1024)
    max_leases: int = Field(16, ge=1)
    step_tokens: int = Field(512, ge=16)
    prefill_slowdown: Finite = Field(4.0, gt=1)
    draft_ahead: bool = True
    deterministic: bool = False
    lease_ttl_s: Finite = Field(60.0, gt=0)
    threads: int | None = Field(None, ge=1)

    @field_validator("device")
    @classmethod
    def _is_supported(cls, device: str) -> str:
        if not re.fullmatch(r"auto|balanced|cpu|cuda(:\d+)?", device):
            raise ValueError(
                f"device {device!r} is not supported: use auto, balanced, cpu, cuda or cuda:0 "
                "(mps cannot compute in float64, which judging needs)"
            )
        return device

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        is_ours = not isinstance(self.quantization, dict)
        is_plain = is_ours and self.device in ("auto", "cpu", "cuda")
        if self.tensor_parallel > 1 and not is_plain:
            raise ValueError(
                "tensor_parallel gives each process a device and splits weights that transformers "
                "does not quantize: set device to auto, cpu or cuda and quantization to fp8, int4 "
                "or int8 or leave it out, or leave tensor_parallel out"
            )
        if self.quantization is not None and is_ours and self.device == "balanced":
            raise ValueError(
                f"quantization: {self.quantization} is not for layers that accelerate places: set "
                "device to auto, cpu or cuda, or give quantization the keys of transformers"
            )
        if self.passage_cache_bits is not None and not self.passage_cache_tokens:
            raise ValueError(
                "passage_cache_bits is for the passages of passage_cache_tokens: set that too, or "
                "leave passage_cache_bits out"
            )
        if (self.disk_cache_folder is None) != (self.disk_cache_gib is None):
            raise ValueError(
                "disk_cache_folder and disk_cache_gib belong together: set both, or none"
            )
        if self.disk_cache_folder is not None and self.host_cache_tokens < self.page_tokens:
            raise ValueError(
                "disk_cache_folder: pages pass through host memory on their way to the disk and "
                "back: set host_cache_tokens too, or leave disk_cache_folder out"
            )
        if self.deterministic and (not is_ours or self.device == "balanced"):
            raise ValueError(
                "deterministic needs weights that are neither quantized by transformers nor spread "
                "over devices: set quantization to int4, int8 or fp8 or leave it out and leave out "
                "device: balanced, or leave out deterministic"
            )
        return self
