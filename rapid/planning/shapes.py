"""What a model's shape says before its weights are there: their number, KV, work, memory. Pure.

The built-in shapes are those of the published ``config.json`` of each repository named. The counts
of parameters they give are the published ones, to the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field

from rapid.config import Frozen

# Rows of logits that each lease may want of one step: drafts of the default length.
_LOGIT_ROWS = 10
# float64 copies of one block's logits while it is judged (`rapid.speculation.acceptance`).
_JUDGING_COPIES = 6
# Scores that attention holds at once on a GPU (`rapid.engines.attention.ragged`); a CPU's kernel
# is fused.
GPU_SCORES = 2**26
# Captured steps of an engine on a GPU (`rapid.engines.forward.cuda_graphs`), and what a graph
# holds for each of its launches: reports go from 16 to 64 KiB; `benchmarks/gpu.py` prints what
# a device says.
GRAPHS = 32
_LAUNCHES = 40  # of a layer
_LAUNCH_BYTES = 2**15
# Slots of one layer that the checks of kernels fill (`rapid.engines.attention.cases`).
CHECK_SLOTS = 2**16


class ModelShape(Frozen):
    """What `config.json` says of a Llama, Qwen2 or Qwen3 model.

    Attributes:
        tied_embeddings: the matrix that makes logits is the table of embeddings.
        attention_biases: of queries, keys and values, as Qwen2 has them.
        output_biases: of attention's output, which Llama and Qwen3 have with the others.
        mlp_biases: of the gated MLP's three projections.
        query_key_norms: a norm of each head's queries and one of its keys, as Qwen3 has them.
    """

    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    intermediate: int = Field(ge=1)
    vocabulary: int = Field(ge=1)
    tied_embeddings: bool = False
    attention_biases: bool = False
    output_biases: bool = False
    mlp_biases: bool = False
    query_key_norms: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """The shape in the words of a checkpoint's `config.json`.

        Raises:
            KeyError: a word is missing.
        """
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        family = config.get("model_type")
        asks_for_biases = bool(config.get("attention_bias")) and family != "qwen2"
        return cls(
            layers=config["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            intermediate=config["intermediate_size"],
            vocabulary=config["vocab_size"],
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_biases=asks_for_biases or family == "qwen2",
            output_biases=asks_for_biases,
            mlp_biases=bool(config.get("mlp_bias")) and family == "llama",
            query_key_norms=family == "qwen3",
        )

    # --- numbers of weights -----------------------------------------------------------------------

    @property
    def layer_weights(self) -> int:
        """Weights of all layers' matrices: queries and output, keys and values, gated MLP."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def weights(self) -> int:
        """Weights that a position is multiplied with; a step reads them once, whatever its rows."""
        return self.layer_weights + self.head_weights

    @property
    def head_weights(self) -> int:
        """Weights of the matrix that makes logits."""
        return self.hidden * self.vocabulary

    @property
    def num_parameters(self) -> int:
        """All of them, with embeddings, norms and biases."""
        tables = self.head_weights * (1 if self.tied_embeddings else 2)
        of_layer = (
            2 * self.hidden  # its norms
            + self.query_key_norms * 2 * self.head_dim
            + self.attention_biases * (self.heads + 2 * self.kv_heads) * self.head_dim
            + self.output_biases * self.hidden
            + self.mlp_biases * (2 * self.intermediate + self.hidden)
        )
        return self.layer_weights + tables + self.layers * of_layer + self.hidden

    # --- bytes ------------------------------------------------------------------------------------

    def weight_bytes(self, layer_bits: float = 16, other_bits: float = 16) -> float:
        """Memory of the parameters.

        Args:
            layer_bits: of a number in the layers' matrices; quantization changes these.
            other_bits: of a number in the tables of embeddings and of logits, which it leaves.
        """
        others = self.num_parameters - self.layer_weights
        return (self.layer_weights * layer_bits + others * other_bits) / 8

    def read_bytes(self, layer_bits: float = 16, other_bits: float = 16) -> float:
        """Weights that one step reads: all but the embeddings, which are looked up."""
        return (self.layer_weights * layer_bits + self.head_weights * other_bits) / 8

    def kv_bytes_per_token(self, bytes_per_number: float = 2) -> float:
        """Keys and values of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_number

    def workspace_bytes(
        self,
        step_tokens: int,
        num_leases: int,
        bytes_per_number: float = 2,
        *,
        on_gpu: bool,
    ) -> float:
        """What the largest step holds beside weights and KV; an estimate from above.

        The widest layer's activations of all rows, the logits that leases may want (as computed and
        in float32), one block while it is judged in float64, and attention's scores: twice in
        float32 and twice in the dtype.
        """
        rows = min(step_tokens, _LOGIT_ROWS * num_leases)
        logits = rows * self.vocabulary * (bytes_per_number + 4)
        judging = _LOGIT_ROWS * self.vocabulary * 8 * _JUDGING_COPIES
        scores = GPU_SCORES * (8 + 2 * bytes_per_number) if on_gpu else 0
        return step_tokens * self._widest * bytes_per_number + logits + judging + scores

    def graph_bytes(self, num_leases: int, bytes_per_number: float = 2) -> float:
        """Captured steps of every shape an engine keeps: an estimate from above.

        Each has its launches and its logits (half of the largest step's on average); the
        activations of the largest are shared by all.
        """
        rows = _LOGIT_ROWS * num_leases
        launches = self.layers * _LAUNCHES * _LAUNCH_BYTES
        logits = rows / 2 * self.vocabulary * bytes_per_number
        return GRAPHS * (launches + logits) + rows * self._widest * bytes_per_number

    def check_bytes(self, step_tokens: int, context: int, bytes_per_number: float = 2) -> float:
        """Checking and timing the kernels of a GPU, on one layer, before anything else runs.

        A cache for the checks; for the plainest kernel float32 copies of the longest context's keys
        and values, four copies of its scores, and six of a prefill chunk's queries.
        """
        slot = 2 * self.kv_heads * self.head_dim
        rows = 6 * step_tokens * self.heads * self.head_dim
        return CHECK_SLOTS * slot * bytes_per_number + 4 * (context * slot + 4 * GPU_SCORES + rows)

    @property
    def _widest(self) -> int:
        """Numbers that one row has at once, at most."""
        heads = 4 * (self.heads + self.kv_heads) * self.head_dim
        return max(4 * self.intermediate, heads) + 4 * self.hidden

    # --- floating-point operations ----------------------------------------------------------------

    def prefill_flops(self, tokens: int) -> float:
        """Of reading a prompt, with logits of its last position only."""
        pairs = tokens * (tokens + 1) / 2
        return 2.0 * (tokens * self.layer_weights + self.head_weights) + self._attention(pairs)

    def decode_flops(self, positions: float, keys: float) -> float:
        """Of `positions` after the prompt, with logits of each, that read `keys` each on average.

        Drafts that were rejected are positions too: they were computed.
        """
        return 2.0 * positions * self.weights + self._attention(positions * keys)

    def _attention(self, pairs: float) -> float:
        return 4.0 * self.layers * self.heads * self.head_dim * pairs


_LLAMA = {"head_dim": 128, "kv_heads": 8, "vocabulary": 128256}
_QWEN = {"head_dim": 128, "vocabulary": 152064, "attention_biases": True}

# By the name that `rapid plan` knows: the repository whose config.json says so, and the shape.
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
}
