"""Frozen settings of the method and of an engine; unknown keys and bad ranges are refused here."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Mode = Literal["plain", "lossless", "fused", "paper", "rag", "auto"]
Transfer = Literal["distill", "boost"]
Coupling = Literal["maximal", "shared_noise"]
Rule = Literal["exact", "paper"]
Contract = Literal["target", "fused", "paper", "drafter"]

Finite = Annotated[float, Field(allow_inf_nan=False)]

LEAST_TEMPERATURE = 1e-5  # dividing logits by less leaves the best token alone, or overflows
PAPER = {"transfer": "distill", "coupling": "maximal", "draft_top_k": None}  # the reference's own


class Frozen(BaseModel):
    """Base of every setting: immutable, unknown keys forbidden, no secret in an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class SamplingConfig(Frozen):
    """How a token is drawn from a distribution.

    Attributes:
        temperature: divides the logits; 0 is greedy, and below 1e-5 it is taken for 0.
        top_p: nucleus mass kept, in (0, 1].
        top_k: number of best tokens kept; None keeps all.
        seed: key of all randomness of the request.
    """

    temperature: Finite = Field(1.0, ge=0, le=2)
    top_p: Finite = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=1)
    seed: int = Field(0, ge=-(2**63), le=2**63 - 1)

    @field_validator("temperature")
    @classmethod
    def _least_is_greedy(cls, temperature: float) -> float:
        return 0.0 if temperature < LEAST_TEMPERATURE else temperature


class SpeculationConfig(Frozen):
    """The method's settings (their letters: ``docs/algorithm.md``).

    Attributes:
        transfer: how the drafter's distribution moves the target's.
        eta: strength of the move; 0 samples the target's own distribution.
        max_draft: tokens asked of the drafter per block (gamma).
        coupling: how draft and result share randomness.
        plausibility: only tokens with draft probability >= this share of the best one are moved.
        draft_top_k: the drafter's proposal is cut to its best tokens; None keeps all.
        transfer_temperature: temperature of the distributions when the request is greedy.
        rule: `exact` samples what the contract says; `paper` is the reference code's rule, which
            samples neither p nor p_hat, for reproducing its tables. It has one transfer, one
            coupling and no cut: left out, they are its own; others are refused.
    """

    transfer: Transfer = "boost"
    eta: Finite = Field(10.0, ge=0, le=1000)
    max_draft: int = Field(10, ge=1, le=64)
    coupling: Coupling = "maximal"
    plausibility: Finite = Field(0.1, ge=0, le=1)
    draft_top_k: int | None = Field(64, ge=1)
    transfer_temperature: Finite = Field(1.0, ge=LEAST_TEMPERATURE, le=2)
    rule: Rule = "exact"

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
    """Draft without a model: copy what followed the same words in the target's own text."""


class WindowDrafting(Frozen):
    """Let the target draft for itself on a part of its own KV (MagicDec, arXiv 2408.11049).

    Attributes:
        num_sinks: tokens at the start of the prompt that every drafted row attends to.
        window: the latest tokens that it attends to, its own among them. RAPID's paper (arXiv
            2502.20330) runs this baseline with 4 sinks and 4096 tokens of KV.
    """

    num_sinks: int = Field(4, ge=0)
    window: int = Field(512, ge=1)


class AnsweringConfig(Frozen):
    """How requests are answered, wherever the engines run.

    Attributes:
        draft_length: `measured` drafts what the measured times and acceptance make fastest, up to
            `max_draft`, and decodes plainly where that is faster and the contract allows it;
            `fixed` always asks for `max_draft`, for measurements that compare at one length.
        target_wait_s: longest wait for a target lease; then the request is refused with 503.
        drafter_wait_s: longest wait for a drafter lease; then `auto` and `lossless` go on without.
        drafter_hangs_s: longest wait for a drafter to read its prompt, or for a round with it, but
            at least ten times the longest round of late; then it counts as lost though it lives.
        default_max_tokens: answer length when the request names none, cut to what fits.
    """

    draft_length: Literal["measured", "fixed"] = "measured"
    target_wait_s: Finite = Field(30.0, gt=0)
    drafter_wait_s: Finite = Field(5.0, gt=0)
    drafter_hangs_s: Finite = Field(30.0, gt=0)
    default_max_tokens: int = Field(512, ge=1)


class EngineConfig(Frozen):
    """One model and the room for its sequences.

    Attributes:
        model: a checkpoint directory, a hub name, ``embedded:target`` or ``embedded:drafter``.
        dtype: of weights and KV; ``auto`` is bfloat16 on CUDA and float32 on a CPU.
        device: ``cpu``, ``cuda`` or ``cuda:1``; ``auto`` takes CUDA when present; ``balanced``
            spreads layers with accelerate.
        rope_scaling: overrides the checkpoint's, for example YaRN for Qwen2.5 beyond 32K.
        quantization: how weights are quantized while they are loaded, in the words of transformers'
            `quantization_config`, for example ``load_in_4bit: true`` (bitsandbytes) or
            ``quant_method: fp8``. A checkpoint stored quantized says so itself.
        max_context: longest prompt plus answer of one sequence, in tokens; None takes the model's.
        kv_cache_tokens: room of the KV pool, in tokens, shared by all sequences.
        host_cache_tokens: room, in tokens, for the KV of prompts that left the pool, in this
            process's memory: long documents come back from there instead of being read again,
            unless that was measured to be slower. 0 has none.
        page_tokens: tokens per KV page.
        max_leases: requests held at once, each with all its choices.
        step_tokens: token budget of one forward; prefill chunks are cut to it.
        prefill_slowdown: what prefill may make of the others' time per token, as measured while the
            engine runs: 2 at most doubles it, on average over a few steps, and leaves a long prompt
            at best half of the time.
        draft_ahead: go on drafting while a block is judged, as if it were going to be accepted; for
            a drafter whose engine has a process of its own.
        deterministic: compute every position in a place and a shape of its own, so that the text is
            the same to the bit whatever else runs, in any dtype (`rapid.engines.forward.tiles`). Slower:
            sequences are computed one after the other.
        lease_ttl_s: a lease that is neither stepped nor renewed for this long is freed.
        threads: compute threads of torch on a CPU; None keeps torch's own choice.
    """

    model: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    rope_scaling: dict[str, object] | None = None
    quantization: dict[str, object] | None = None
    max_context: int | None = Field(None, ge=16)
    kv_cache_tokens: int = Field(32768, ge=16)
    host_cache_tokens: int = Field(0, ge=0)
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
    def _rows_are_computed_apart(self) -> Self:
        if self.deterministic and (self.quantization is not None or self.device == "balanced"):
            raise ValueError(
                "deterministic needs weights that are neither quantized nor spread over devices: "
                "leave quantization and device: balanced out, or deterministic"
            )
        return self
