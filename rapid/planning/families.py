"""The model families that engines run, and what their ``config.json`` leaves to a default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma3_text", "gpt_oss")

# Why other architectures, by the name in `model_type`, cannot be run.
_RECURRENT = (
    "it has recurrent layers, whose state cannot go back to before a rejected draft as stored keys "
    "and values can"
)
_LATENT = (
    "it stores a compressed form of keys and values (multi-head latent attention), which the KV "
    "pages here do not hold"
)
_CAPPED = "its attention caps the scores, which the attention kernels here do not compute"
_OTHER_EXPERTS = (
    "of the mixtures of experts only Qwen3's (qwen3_moe) and gpt-oss (gpt_oss) have been checked"
)
_IMAGES = "it reads images as well; of such checkpoints only Gemma 3's text model is supported"
_REASONS = {
    _RECURRENT: (
        "bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe mamba "
        "mamba2 minimax nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text "
        "qwen3_next recurrent_gemma rwkv xlstm zamba zamba2"
    ),
    _LATENT: "deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 kimi_k2 longcat_flash minicpm3",
    _CAPPED: "gemma2",
    _OTHER_EXPERTS: "dbrx ernie4_5_moe glm4_moe llama4_text mixtral olmoe phimoe qwen2_moe",
    _IMAGES: "gemma3n gemma4 llama4 mistral3 qwen2_5_vl qwen2_vl qwen3_vl qwen3_vl_moe",
}
_REASON_OF = {name: reason for reason, names in _REASONS.items() for name in names.split()}

_WINDOW = 4096  # default of `sliding_window`; Phi-3 has none unless its file names one
_GPT_OSS_WINDOW = 128  # its default
_QWEN_FULL_LAYERS = 28  # default of `max_window_layers`
_GEMMA_PATTERN = 6  # default of `sliding_window_pattern`: each sixth layer attends to all tokens


def refusal(family: object) -> str | None:
    """Return why models of a family cannot be run, or None if they can."""
    if family in FAMILIES:
        return None
    reason = _REASON_OF.get(str(family))
    return f"{reason}; " * bool(reason) + f"supported are {', '.join(FAMILIES)}"


def window_of(config: Mapping[str, Any]) -> int | None:
    """Return the number of last tokens that sliding layers attend to; None without such layers."""
    family = config.get("model_type")
    if family in ("qwen2", "qwen3", "qwen3_moe") and not config.get("use_sliding_window"):
        return None
    if family == "llama":
        return None
    default = {"phi3": None, "gpt_oss": _GPT_OSS_WINDOW}.get(str(family), _WINDOW)
    window: int | None = config.get("sliding_window", default)
    return window


def sliding_layers(config: Mapping[str, Any]) -> list[bool]:
    """Return for each layer whether it attends to the last `window_of` tokens only."""
    num_layers = config["num_hidden_layers"]
    family = config.get("model_type")
    if window_of(config) is None:
        return [False] * num_layers
    if family in ("mistral", "phi3", "qwen3_moe"):
        return [True] * num_layers
    if types := config.get("layer_types"):
        return [name == "sliding_attention" for name in types]
    if family == "gpt_oss":
        return [not layer % 2 for layer in range(num_layers)]
    if family == "gemma3_text":
        pattern = config.get("sliding_window_pattern", _GEMMA_PATTERN)
        return [bool((layer + 1) % pattern) for layer in range(num_layers)]
    first = config.get("max_window_layers", _QWEN_FULL_LAYERS)
    return [layer >= first for layer in range(num_layers)]


def expert_layers(config: Mapping[str, Any]) -> list[bool]:
    """Return for each layer whether its MLP is a mixture of experts."""
    num_layers, family = config["num_hidden_layers"], config.get("model_type")
    if family != "qwen3_moe":
        return [family == "gpt_oss"] * num_layers
    dense, every = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step", 1)
    return [layer not in dense and not (layer + 1) % every for layer in range(num_layers)]
