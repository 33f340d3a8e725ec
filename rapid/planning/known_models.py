"""Published models by the name that ``rapid plan`` knows, with shapes of their ``config.json``."""

from __future__ import annotations

from rapid.planning.shapes import ModelShape

_LLAMA = {"head_dim": 128, "kv_heads": 8, "vocabulary": 128256}  # from the config.json of Llama 3
_GPT_OSS = {
    "head_dim": 64, "vocabulary": 201088, "hidden": 2880, "heads": 64, "kv_heads": 8,
    "intermediate": 2880, "attention_biases": True, "output_biases": True, "window": 128,
    "experts_per_token": 4, "expert_intermediate": 2880, "is_gpt_oss": True,
}  # fmt: skip
_QWEN = {"head_dim": 128, "vocabulary": 152064, "attention_biases": True}
_QWEN3 = {"head_dim": 128, "vocabulary": 151936, "kv_heads": 8, "query_key_norms": True}
_QWEN3_SHAPES: dict[str, dict[str, int]] = {  # of the models without experts
    "0.6b": {"layers": 28, "hidden": 1024, "heads": 16, "intermediate": 3072},
    "1.7b": {"layers": 28, "hidden": 2048, "heads": 16, "intermediate": 6144},
    "4b": {"layers": 36, "hidden": 2560, "heads": 32, "intermediate": 9728},
    "8b": {"layers": 36, "hidden": 4096, "heads": 32, "intermediate": 12288},
    "14b": {"layers": 40, "hidden": 5120, "heads": 40, "intermediate": 17408},
    "32b": {"layers": 64, "hidden": 5120, "heads": 64, "intermediate": 25600},
}  # fmt: skip

# By the name that `rapid plan` knows: the repository of the config.json, and the shape.
KNOWN_SHAPES: dict[str, tuple[str, ModelShape]] = {
    "llama-3.2-1b": (
        "meta-llama/Llama-3.2-1B-Instruct",
        ModelShape(
            **_LLAMA | {"head_dim": 64, "tied_embeddings": True},
            layers=16,
            hidden=2048,
            heads=32,
            intermediate=8192,
        ),
    ),
    "llama-3.1-8b": (
        "meta-llama/Llama-3.1-8B-Instruct",
        ModelShape(**_LLAMA, layers=32, hidden=4096, heads=32, intermediate=14336),
    ),
    "llama-3.1-70b": (
        "meta-llama/Llama-3.1-70B-Instruct",
        ModelShape(**_LLAMA, layers=80, hidden=8192, heads=64, intermediate=28672),
    ),
    "qwen2.5-7b": (
        "Qwen/Qwen2.5-7B-Instruct",
        ModelShape(**_QWEN, layers=28, hidden=3584, heads=28, kv_heads=4, intermediate=18944),
    ),
    "qwen2.5-72b": (
        "Qwen/Qwen2.5-72B-Instruct",
        ModelShape(**_QWEN, layers=80, hidden=8192, heads=64, kv_heads=8, intermediate=29568),
    ),
    "mistral-7b": (
        "mistralai/Mistral-7B-Instruct-v0.3",
        ModelShape(
            **_LLAMA | {"vocabulary": 32768}, layers=32, hidden=4096, heads=32, intermediate=14336
        ),
    ),
    "phi-4": (
        "microsoft/phi-4",
        ModelShape(
            head_dim=128,
            vocabulary=100352,
            layers=40,
            hidden=5120,
            heads=40,
            kv_heads=10,
            intermediate=17920,
        ),
    ),
    **{
        f"qwen3-{name}": (
            f"Qwen/Qwen3-{name.upper()}",
            ModelShape(**_QWEN3, **shape, tied_embeddings=shape["hidden"] <= 2560),
        )
        for name, shape in _QWEN3_SHAPES.items()
    },
    "qwen3-30b-a3b": (
        "Qwen/Qwen3-30B-A3B",
        ModelShape(
            **_QWEN3 | {"kv_heads": 4},
            layers=48,
            hidden=2048,
            heads=32,
            intermediate=6144,
            expert_layers=48,
            experts=128,
            experts_per_token=8,
            expert_intermediate=768,
        ),
    ),
    "gpt-oss-20b": (
        "openai/gpt-oss-20b",
        ModelShape(**_GPT_OSS, layers=24, sliding_layers=12, expert_layers=24, experts=32),
    ),
    "gpt-oss-120b": (
        "openai/gpt-oss-120b",
        ModelShape(**_GPT_OSS, layers=36, sliding_layers=18, expert_layers=36, experts=128),
    ),
    "gemma-3-1b": (
        "google/gemma-3-1b-it",
        ModelShape(
            head_dim=256,
            vocabulary=262144,
            layers=26,
            hidden=1152,
            heads=4,
            kv_heads=1,
            intermediate=6912,
            tied_embeddings=True,
            query_key_norms=True,
            layer_norms=4,
            sliding_layers=22,
            window=512,
        ),
    ),
}

# Whose vocabulary a model has; the numbers of rows of one may differ by padding.
KNOWN_VOCABULARIES = {
    "llama-3.2-1b": "Llama 3",
    "llama-3.1-8b": "Llama 3",
    "llama-3.1-70b": "Llama 3",
    "qwen2.5-7b": "Qwen2.5",
    "qwen2.5-72b": "Qwen2.5",
    "mistral-7b": "Mistral 7B v0.3",
    "phi-4": "Phi-4",
    **{f"qwen3-{name}": "Qwen3" for name in _QWEN3_SHAPES},
    "qwen3-30b-a3b": "Qwen3",
    "gpt-oss-20b": "gpt-oss",
    "gpt-oss-120b": "gpt-oss",
    "gemma-3-1b": "Gemma 3",
}
