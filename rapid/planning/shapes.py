"""Model shapes, and the parameters, KV, operations and memory that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field

from rapid.config import Frozen, SpeculationConfig
from rapid.planning.families import expert_layers, sliding_layers, window_of

# Rows of logits that each lease may want of one step: a draft block of the default length.
_LOGIT_ROWS = SpeculationConfig().max_draft
# Numbers in float64 for each logit that judging holds: on a CPU one block at a time
# (`rapid.speculation.acceptance`), on a GPU so many rows at once
# (`rapid.speculation.fast.row_kernels`).
_JUDGING_COPIES = 6
_JUDGING_COPIES_ON_GPU = 4  # with filters, whose sort has copies of its own
_JUDGED_ROWS = 96  # a test keeps it equal to `MOST_ROWS` of the judging step
# Rows of each lease in the largest captured step, padded; the largest buckets have less than half a
# default block per lease on average (`rapid.engines.forward.graphs.buckets`).
_PADDED_ROWS = 16
CHUNK_ROWS = 64  # of a prompt's chunk in such a step; a test keeps it equal to that of the buckets
# Scores that attention holds at once on a GPU (`rapid.engines.attention.ragged`); the CPU's
# kernel is fused.
GPU_SCORES = 2**26
# Captured steps of an engine on a GPU (`rapid.engines.forward.graphs.cuda_graphs`), and the bytes
# that a graph holds for each of its launches: reports range from 16 to 64 KiB, and
# `benchmarks/gpu.py` prints the value of a device.
GRAPHS = 40
_LAUNCHES = 32  # launches per layer
_LAUNCH_BYTES = 2**15
# Families in which `attention_bias` gives the projections of attention biases.
_ATTENTION_BIAS = ("llama", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss")
# Slots of one layer that the checks of the kernels fill (`rapid.engines.attention.cases`).
CHECK_SLOTS = 2**16


class ModelShape(Frozen):
    """The shape of a model of a supported family, from its `config.json`."""

    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)  # width of the hidden states
    heads: int = Field(ge=1)  # query heads of a layer
    kv_heads: int = Field(ge=1)  # key and value heads of a layer
    head_dim: int = Field(ge=1)
    intermediate: int = Field(ge=1)  # width of the MLP
    vocabulary: int = Field(ge=1)  # rows of the embedding table
    tied_embeddings: bool = False  # whether the output matrix is the embedding table
    attention_biases: bool = False  # whether queries, keys and values have biases, as in Qwen2
    # Whether attention's output has a bias, as in Llama and Qwen3 with the others.
    output_biases: bool = False
    mlp_biases: bool = False  # whether the three projections of the gated MLP have biases
    query_key_norms: bool = False  # whether queries and keys of each head have norms, as in Qwen3
    layer_norms: int = 2  # norms of a layer beside those
    sliding_layers: int = Field(0, ge=0)  # layers that attend to the last `window` tokens only
    window: int = Field(0, ge=0)  # see `sliding_layers`; 0 where there are none
    expert_layers: int = Field(0, ge=0)  # layers whose MLP is a mixture of experts
    experts: int = Field(0, ge=0)
    experts_per_token: int = Field(0, ge=0)
    expert_intermediate: int = Field(0, ge=0)
    # Whether the experts of all layers and their routers have biases, and heads a sink each.
    is_gpt_oss: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Return the shape that the `config.json` of a checkpoint describes.

        Raises:
            KeyError: a required key is missing.
        """
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        family = config.get("model_type")
        is_gpt_oss = family == "gpt_oss"
        has_biases = bool(config.get("attention_bias", is_gpt_oss))
        asks_for_biases = has_biases and family in _ATTENTION_BIAS
        num_sliding, num_mixed = sum(sliding_layers(config)), sum(expert_layers(config))
        mixture = {}
        if num_mixed:
            mixture = {
                "expert_layers": num_mixed,
                "experts": config.get("num_experts") or config["num_local_experts"],
                "experts_per_token": config["num_experts_per_tok"],
                "expert_intermediate": config[f"{'' if is_gpt_oss else 'moe_'}intermediate_size"],
                "is_gpt_oss": is_gpt_oss,
            }
        return cls(
            layers=config["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            intermediate=config["intermediate_size"],
            vocabulary=config["vocab_size"],
            tied_embeddings=bool(config.get("tie_word_embeddings", family == "gemma3_text")),
            attention_biases=asks_for_biases or family == "qwen2",
            output_biases=asks_for_biases,
            mlp_biases=bool(config.get("mlp_bias")) and family == "llama",
            query_key_norms=family in ("qwen3", "qwen3_moe", "gemma3_text"),
            layer_norms=4 if family == "gemma3_text" else 2,
            sliding_layers=num_sliding,
            window=window_of(config) if num_sliding else 0,
            **mixture,
        )

    def find_undivided(self, size: int) -> str | None:
        """Return what cannot be divided into `size` parts, such as ``8 key and value heads``."""
        heads, kv_heads, columns = self.heads, self.kv_heads, self.expert_intermediate
        rests = {
            f"{heads} attention heads": heads % size,
            # Where there are more parts than heads, several parts have the same one.
            f"{kv_heads} key and value heads": max(kv_heads, size) % min(kv_heads, size),
            f"{self.intermediate} columns of the MLP": self.intermediate % size,
            # Products of experts read rows of multiples of 16 bytes.
            f"{columns} columns of each expert": columns % (8 * size),
        }
        return next((what for what, rest in rests.items() if rest), None)

    def part_of(self, size: int) -> Self:
        """Return the shape of one of `size` parts, as tensor parallelism splits a model."""
        return self.model_copy(
            update={
                "heads": self.heads // size,
                "kv_heads": max(self.kv_heads // size, 1),
                "intermediate": self.intermediate // size,
                "expert_intermediate": self.expert_intermediate // size,
                "vocabulary": -(-self.vocabulary // size),
            }
        )

    # --- numbers of weights -----------------------------------------------------------------------

    @property
    def layer_weights(self) -> int:
        """Number of weights in all layers' matrices: queries, keys, values, output, gated MLP."""
        return self._with_experts(self.experts)

    @property
    def active_weights(self) -> int:
        """Number of weights in all layers' matrices that multiply a position."""
        return self._with_experts(self.experts_per_token)

    def _with_experts(self, num_experts: int) -> int:
        """Return the weights in all layers' matrices, with some of the experts of a mixture."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        dense = (self.layers - self.expert_layers) * 3 * self.intermediate
        mixed = self.expert_layers * (self.experts + 3 * num_experts * self.expert_intermediate)
        return self.layers * attention + self.hidden * (dense + mixed)

    @property
    def weights(self) -> int:
        """Number of weights that multiply a position; a step of a dense model reads them once."""
        return self.active_weights + self.head_weights

    @property
    def head_weights(self) -> int:
        """Number of weights in the output matrix, which computes the logits."""
        return self.hidden * self.vocabulary

    @property
    def num_parameters(self) -> int:
        """Number of all parameters, with embeddings, norms and biases."""
        tables = self.head_weights * (1 if self.tied_embeddings else 2)
        of_layer = (
            self.layer_norms * self.hidden
            + self.query_key_norms * 2 * self.head_dim
            + self.attention_biases * (self.heads + 2 * self.kv_heads) * self.head_dim
            + self.output_biases * self.hidden
            + self.mlp_biases * (2 * self.intermediate + self.hidden)
            + self.is_gpt_oss * self.heads
            + self.is_gpt_oss * self.experts * (1 + 2 * self.expert_intermediate + self.hidden)
        )
        return self.layer_weights + tables + self.layers * of_layer + self.hidden

    # --- bytes ------------------------------------------------------------------------------------

    def weight_bytes(self, layer_bits: float = 16, other_bits: float = 16) -> float:
        """Return the bytes of all parameters; quantization changes only the layers' bits."""
        others = self.num_parameters - self.layer_weights
        return (self.layer_weights * layer_bits + others * other_bits) / 8

    def read_bytes(self, layer_bits: float = 16, other_bits: float = 16, rows: float = 1) -> float:
        """Return the bytes of weights that a step reads: all but the looked-up embeddings.

        Of a mixture, the experts that at least one row chose, as if every row chose at random.
        """
        layers: float = self.layer_weights
        if self.experts:
            unused = (1 - self.experts_per_token / self.experts) ** rows
            per_expert = 3 * self.hidden * self.expert_intermediate * self.expert_layers
            layers -= unused * self.experts * per_expert
        return (layers * layer_bits + self.head_weights * other_bits) / 8

    def kv_read_bytes(self, context: int, bytes_per_number: float = 2) -> float:
        """Return the bytes of keys and values that a position attends to after `context` tokens."""
        return self._keys(context) * self.kv_bytes_per_token(bytes_per_number)

    def _keys(self, context: float) -> float:
        """Return the keys that a position attends to, on average over the layers."""
        unseen = max(0.0, context - self.window) * self.sliding_layers / self.layers
        return context - unseen

    def kv_bytes_per_token(self, bytes_per_number: float = 2) -> float:
        """Return the bytes of keys and values of one token, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_number

    def count_kept_tokens(self, num_tokens: float, in_rings: float | None) -> float:
        """Return the tokens that are kept, on average over the layers.

        `num_tokens` have pages; `in_rings` are those of sliding layers, None where they have pages.
        """
        unkept = 0.0 if in_rings is None else (num_tokens - in_rings) * self.sliding_layers
        return num_tokens - unkept / self.layers

    def workspace_bytes(
        self,
        step_tokens: int,
        num_leases: int,
        bytes_per_number: float = 2,
        *,
        on_gpu: bool,
    ) -> float:
        """Return an upper estimate of the bytes of the largest step beside weights and KV."""
        # The activations of all rows in the widest layer, the logits that leases may want (as
        # computed and in float32), those that are judged at once in float64, and attention's
        # scores: twice in float32 and twice in the dtype.
        rows = min(step_tokens, _LOGIT_ROWS * num_leases)
        logits = rows * self.vocabulary * (bytes_per_number + 4)
        judged, copies = _LOGIT_ROWS, _JUDGING_COPIES
        if on_gpu:
            judged, copies = min(rows, _JUDGED_ROWS), _JUDGING_COPIES_ON_GPU
        judging = judged * self.vocabulary * 8 * copies
        scores = GPU_SCORES * (8 + 2 * bytes_per_number) if on_gpu else 0
        return step_tokens * self._widest * bytes_per_number + logits + judging + scores

    def graph_bytes(self, num_leases: int, bytes_per_number: float = 2) -> float:
        """Return an upper estimate of the bytes of the captured steps that an engine keeps."""
        # Each holds its launches and its rows' logits; all share the largest one's activations.
        launches = self.layers * _LAUNCHES * _LAUNCH_BYTES
        logits = _LOGIT_ROWS / 2 * num_leases * self.vocabulary * bytes_per_number
        most_rows = _PADDED_ROWS * num_leases + CHUNK_ROWS
        largest = most_rows * self._widest * bytes_per_number
        return GRAPHS * (launches + logits) + largest

    def check_bytes(self, step_tokens: int, context: int, bytes_per_number: float = 2) -> float:
        """Return the bytes that checking and timing a GPU's kernels takes, before anything runs."""
        # For one layer, a cache for the checks and, for the unfused kernel, float32 copies of the
        # longest context's keys and values, four copies of its scores, and six of the queries.
        slot = 2 * self.kv_heads * self.head_dim
        rows = 6 * step_tokens * self.heads * self.head_dim
        return CHECK_SLOTS * slot * bytes_per_number + 4 * (context * slot + 4 * GPU_SCORES + rows)

    @property
    def _widest(self) -> int:
        """Largest number of activations that one row holds at once."""
        heads = 4 * (self.heads + self.kv_heads) * self.head_dim
        chosen = self.experts_per_token * (self.expert_intermediate + self.hidden)
        return max(4 * self.intermediate, heads, 4 * chosen) + 4 * self.hidden

    # --- floating-point operations ----------------------------------------------------------------

    def prefill_flops(self, tokens: int) -> float:
        """Return the operations of a prefill, with logits of its last position only."""
        pairs = tokens * (tokens + 1) / 2
        unseen = max(0, tokens - self.window)
        pairs -= unseen * (unseen + 1) / 2 * self.sliding_layers / self.layers
        return 2.0 * (tokens * self.active_weights + self.head_weights) + self._attention(pairs)

    def decode_flops(self, positions: float, keys: float) -> float:
        """Return the operations of `positions` after the prompt, with logits of each.

        Each attends to `keys` keys on average. Rejected drafts are positions, too.
        """
        attention = self._attention(positions * self._keys(keys))
        return 2.0 * positions * self.weights + attention

    def _attention(self, pairs: float) -> float:
        return 4.0 * self.layers * self.heads * self.head_dim * pairs
