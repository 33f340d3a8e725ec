"""Settings of engines that vLLM computes, and what such an engine cannot do."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rapid.config import EngineConfig, Finite, Frozen, SpeculationConfig

VLLM_TOP_K = 256  # candidates of a token that vLLM is asked for; each is an object in its reply


class VllmConfig(Frozen):
    """Settings of an engine that vLLM computes: one that drafts.

    Attributes:
        model: A checkpoint directory, a hub name, or a name that ``rapid models list`` shows.
        dtype: Data type of weights and KV; ``auto`` is the checkpoint's.
        max_context: Longest prompt plus answer of one sequence, in tokens.
        tensor_parallel: GPUs of one machine that compute every layer together.
        quantization: vLLM's name of a quantization of the weights; None takes the checkpoint's.
        gpu_memory_share: Part of each GPU's memory that vLLM takes for weights and KV.
        max_leases: Requests held at once, each with all its choices.
    """

    # vLLM decides by itself what these say of an `EngineConfig`.
    deterministic: ClassVar[bool] = False
    disk_cache_folder: ClassVar[None] = None
    passage_cache_tokens: ClassVar[int] = 0
    threads: ClassVar[None] = None
    lease_ttl_s: ClassVar[float] = 60.0  # the default of an `EngineConfig`

    kind: Literal["vllm"]
    model: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_context: int = Field(ge=16)
    tensor_parallel: int = Field(1, ge=1, le=64)
    quantization: str | None = Field(None, min_length=1)
    gpu_memory_share: Finite = Field(0.9, gt=0, le=1)
    max_leases: int = Field(16, ge=1)

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that leases may reserve; vLLM makes room for them by itself."""
        return self.max_leases * self.max_context


AnyEngineConfig = EngineConfig | VllmConfig


def vllm_refusal(speculation: SpeculationConfig, *, is_greedy: bool) -> tuple[str, str] | None:
    """Return the setting with which vLLM cannot draft, and why; None if there is none.

    Args:
        speculation: The settings of a request, or the defaults of all.
        is_greedy: Whether nothing is drawn.
    """
    top_k = speculation.draft_top_k
    if top_k is None or top_k > VLLM_TOP_K:
        return "draft_top_k", f"is at most {VLLM_TOP_K} where vLLM drafts, and not null: set it"
    if speculation.coupling == "shared_noise" and not is_greedy:
        return "coupling", (
            "'shared_noise', which a seed implies, needs a drafter that draws with the request's "
            "noise, and vLLM draws by itself: take 'maximal', under which a seed does not fix the "
            "text, temperature 0, or mode 'plain'"
        )
    if speculation.transfer_temperature != 1:
        return "transfer_temperature", "is 1 where vLLM drafts: leave it out"
    return None
