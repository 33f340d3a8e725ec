"""Planning of replicas: what fits on GPUs, and how fast a step can be at best.

Times are rooflines: reading the weights and every sequence's KV once, or the multiplications,
whichever takes longer; and, with `Losses`, what is likely to come on top. The formulas with their
sources are in ``docs/planning.md``.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from rapid.planning import packed_bits
from rapid.planning.ring_sizes import tokens_in_rings

if TYPE_CHECKING:
    from rapid.planning.gpus import GPU
    from rapid.planning.shapes import ModelShape

USABLE = 0.9  # share of a GPU's memory; the driver, allocator and other libraries hold the rest
COMPUTE_SHARE = 0.5  # share of the peak that large matrix products reach
GROUP_SIZES = (1, 2, 4, 8)  # numbers of GPUs that are tried where none is given
MACHINE_GPUS = 8  # GPUs of one machine
STEP_TOKENS = 4096  # tokens of the largest step, as in cluster/configs
PAGE_TOKENS = 16  # tokens of a page, which is what engines take by default
FP8_BITS = 8  # of the weights that `quantization: fp8` makes
NETWORK_BANDWIDTH = 50e9  # bytes per second between machines for each GPU (400 Gb/s); assumed
ACTIVATION_BYTES = 2  # of a number in what is summed: bfloat16


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Memory of a model's replica on its devices or on the host, by purpose, in bytes."""

    weights: float = 0.0
    kv_pool: float = 0.0  # pages of keys and values
    workspace: float = 0.0
    host_cache: float = 0.0
    graphs: float = 0.0
    # Check of the kernels while an engine starts on a GPU, before there are steps.
    check: float = 0.0

    @property
    def pools(self) -> float:
        """Bytes of the KV pool and the host cache, whose sizes are configured."""
        return self.kv_pool + self.host_cache

    @property
    def work(self) -> float:
        """Bytes that computing needs: the larger of the start-up check and the largest step."""
        return max(self.workspace + self.graphs, self.check)

    @property
    def total(self) -> float:
        """Peak number of bytes."""
        return self.weights + self.work + self.pools


_LAUNCH_S = 4.5e-6  # seconds of an operation that Python launches; an estimate
_TRANSFER_S = 15e-6  # seconds of a small transfer to or from a GPU; an estimate


@dataclass(frozen=True, slots=True)
class Losses:
    """Losses of a step: the shares of a GPU's limits that it reaches, and seconds on top.

    The defaults are what is likely on an H200: estimates, where a comment names no other source.
    `benchmarks/gpu.py` reports those that it measures, for ``rapid plan --measured``.
    """

    weights_share: float = 0.83  # of the bandwidth, as products of few rows read weights
    four_bits_share: float = 0.45  # the same with weights of four bits
    kv_share: float = 0.7  # of the bandwidth, as the attention of a decoding step reads KV
    # Operations per second of a prefill's attention: FlashAttention-2 on an H100 (arXiv 2407.08608,
    # abstract: .35 of its peak); FlashAttention-3 reaches more than `COMPUTE_SHARE`.
    attention_flops: float = 350e12
    # A step's Python (0.15 ms and 0.03 a sequence, see `LIMIT`), copies of inputs, launch and wait.
    step_s: float = 4.3e-4
    sequence_s: float = 6e-5
    # Of a layer in a graph: 4 small kernels (`rapid.engines.forward.layers.layer_kernels`),
    # counted, where torch has 14 and, with fp8, 32 more; and the merge of attention's parts.
    layer_s: float = 4 * 2e-6 + 8.5e-6
    layer_sequence_s: float = 0.0  # where attention is called once for each sequence: on a CPU
    fp8_layer_s: float = 2e-6  # the kernel that `quantization: fp8` adds to it
    # Launches that `tests/rapid/speculation/fast/test_step_counts.py` counts, and a transfer each
    # way: of a sampled plain step, a witnessed block, and a drafted token, which is not read alone.
    sampling_s: float = 11 * _LAUNCH_S + 2 * _TRANSFER_S
    judging_s: float = 12 * _LAUNCH_S + 2 * _TRANSFER_S
    drafting_s: float = 12 * _LAUNCH_S + _TRANSFER_S
    reduce_s: float = 14e-6  # of a small sum over GPUs of one machine: NCCL over NVLink
    network_reduce_s: float = 30e-6  # the same of several machines: InfiniBand
    # Ray's calls of a round: 3.1 ms on two busy cores (docs/performance.md); fewer on a server.
    round_s: float = 1.2e-3

    def host_s(self, batch: float, layers: int) -> float:
        """Return the seconds of a step of `batch` sequences beside reading and computing."""
        each_layer = self.layer_s + batch * self.layer_sequence_s
        return self.step_s + batch * self.sequence_s + layers * each_layer


LIKELY = Losses()
# Nothing is lost but small sums, at the time of a kernel made for them (an estimate).
IDEAL = Losses(
    **dict.fromkeys([each.name for each in fields(Losses)], 0.0)
    | dict.fromkeys(("weights_share", "four_bits_share", "kv_share"), 1.0)
    | {"attention_flops": math.inf, "reduce_s": 9e-6, "network_reduce_s": 30e-6}
)
# Python around a step as well, as `benchmarks/results/planned.md` has it for a CPU.
LIMIT = replace(IDEAL, step_s=1.5e-4, sequence_s=3e-5)


@dataclass(frozen=True, slots=True)
class Replica:
    """A model on one GPU or on several, of one machine or more.

    With ``tensor_parallel``, every layer is split over the GPUs, which read and compute at once and
    add their results twice a layer; weights may have 16 bits, 8 (``quantization: fp8``) or 4
    (``quantization: int4``, whose scales are counted too).
    """

    shape: ModelShape
    gpu: GPU
    context: int  # tokens of KV that every sequence has
    # Those at its start that all sequences have in common, as in several questions on one document:
    # they are held once, and a step reads them once.
    shared: int = 0
    num_gpus: int = 1
    # GPUs of one machine; a replica with more has as many of each of several.
    machine_gpus: int = MACHINE_GPUS
    layer_bits: float = 16  # bits of a weight in the layers' matrices
    # Bits of a weight in embeddings and logits, which quantization does not change.
    other_bits: float = 16
    kv_bytes: float = 2  # bytes of a number in keys and values; 1 with ``kv_cache_dtype: fp8``
    losses: Losses = IDEAL
    # Tokens of a sequence's retrieved text, which a target weighs beside its own as it verifies
    # (``transfer: adaptive``); 0 where it does not.
    witness: int = 0
    # How a checkpoint that is published quantized stores the layers' matrices, `layer_bits` each.
    stored: packed_bits.StoredBits | None = None

    @property
    def num_at_once(self) -> int:
        """Number of GPUs that compute a layer together."""
        # Mixtures that are quantized are left to transformers.
        ours = () if self.shape.experts else (packed_bits.BITS, FP8_BITS)
        is_split = self.layer_bits in (*ours, self.other_bits)
        return self.num_gpus if self.num_gpus and is_split else 1

    @property
    def unpackable(self) -> str | None:
        """The part of a shard that cannot be packed in four bits (``80 columns``), or None."""
        return packed_bits.unpackable(self._part) if self._is_int4 else None

    @property
    def _part(self) -> ModelShape:
        return self.shape.part_of(self.num_at_once)

    @property
    def _is_int4(self) -> bool:
        return self.layer_bits == packed_bits.BITS and not self.shape.experts

    @property
    def _all_bits(self) -> tuple[float, float]:
        """Bits of a weight in the layers' matrices, with its share of scales, and elsewhere."""
        if self.stored is not None:
            return packed_bits.layer_bits_of(self._part, self.stored), self.other_bits
        bits = packed_bits.layer_bits(self._part) if self._is_int4 else self.layer_bits
        return bits, self.other_bits

    @property
    def num_machines(self) -> int:
        """Number of machines that it is spread over."""
        return max(1, -(-self.num_gpus // self.machine_gpus))

    @property
    def kv_per_sequence(self) -> float:
        """Bytes of KV of one sequence."""
        return self.kv_of(1)

    def kv_of(self, num_sequences: float) -> float:
        """Return the bytes of KV of that many sequences together."""
        num_tokens = self.shared + num_sequences * (self.context - self.shared)
        in_rings = None
        if self.shape.sliding_layers:
            each = tokens_in_rings(self.shape.window, self.context, PAGE_TOKENS, STEP_TOKENS)
            in_rings = None if each is None else num_sequences * each
        kept = self.shape.count_kept_tokens(num_tokens, in_rings)
        return kept * self.shape.kv_bytes_per_token(self.kv_bytes)

    @property
    def usable(self) -> float:
        """Bytes of all GPUs together that weights, KV and workspace may take."""
        return self.num_gpus * self.gpu.memory * USABLE

    def need(self, num_sequences: int) -> MemoryNeed:
        """Return the memory for `num_sequences`; every GPU needs its own workspace."""
        part = self._part
        workspace = part.workspace_bytes(STEP_TOKENS, num_sequences, on_gpu=True)
        workspace += packed_bits.unpacking_bytes(part) if self._is_int4 else 0
        return MemoryNeed(
            self.shape.weight_bytes(*self._all_bits),
            self.kv_of(num_sequences),
            self.num_gpus * workspace,
            graphs=self.num_gpus * part.graph_bytes(num_sequences),
            check=self.num_gpus * part.check_bytes(STEP_TOKENS, self.context),
        )

    @property
    def max_sequences(self) -> int:
        """Largest number of sequences that fit; 0 if not even one does."""
        own = self.kv_of(2) - self.kv_of(1)
        candidates = range(1, int(self.usable // own) + 2)
        return bisect_right(candidates, self.usable, key=lambda num: self.need(num).total)

    def step_s(self, batch: float, rows: int = 1, witness: int = 0) -> float:
        """Return the seconds of one forward of `batch` sequences with `rows` new tokens each.

        With a `witness` there are as many sequences of its length beside them.
        """
        losses = self.losses
        num_sequences = batch * (1 + (witness > 0))
        weights = self.shape.read_bytes(*self._all_bits, num_sequences * rows)
        own, shared = self.context - self.shared, self.shared
        kv = batch * sum(self.shape.kv_read_bytes(each, self.kv_bytes) for each in (own, witness))
        kv += self.shape.kv_read_bytes(shared, self.kv_bytes)
        weights_share = losses.four_bits_share if self._is_int4 else losses.weights_share
        reading = weights / weights_share + kv / losses.kv_share
        work = batch * self.shape.decode_flops(rows, self.context)
        work += batch * self.shape.decode_flops(rows * (witness > 0), witness)
        forward_s = max(reading / (self.num_at_once * self.gpu.bandwidth), work / self._flops)
        sending = self._sending_s(num_sequences * rows)
        return self._overhead_s(num_sequences) + sending + forward_s

    def plain_s(self, batch: float) -> float:
        """Return the seconds of a step of plain decoding, with its sampling."""
        return self.step_s(batch) + self.losses.sampling_s

    def draft_s(self, batch: float) -> float:
        """Return the seconds of a drafted token of `batch` sequences, with its sampling."""
        return self.step_s(batch) + self.losses.drafting_s

    def verify_s(self, batch: float, rows: int) -> float:
        """Return the seconds of scoring and judging `rows` drafts of `batch` sequences."""
        return self.step_s(batch, rows, self.witness) + self.losses.judging_s

    def prefill_s(self) -> float:
        """Return the seconds that computing the KV of one sequence takes."""
        products = 2.0 * (self.context * self.shape.active_weights + self.shape.head_weights)
        attention = self.shape.prefill_flops(self.context) - products
        slower = max(1.0, self.gpu.flops * COMPUTE_SHARE / self.losses.attention_flops)
        return (products + attention * slower) / self._flops + self._sending_s(self.context)

    def free_rows(self, batch: int) -> int:
        """Return the most rows per sequence for which reading memory still bounds a step."""
        one = batch * self.shape.decode_flops(1, self.context)
        reading_s = self.step_s(batch) - self._overhead_s(batch) - self._sending_s(batch)
        return int(reading_s * self._flops / one)

    def _overhead_s(self, batch: float) -> float:
        """Return a step's seconds that no bandwidth shortens: the host's, and those of its sums."""
        losses, layers = self.losses, self.shape.layers
        each = losses.network_reduce_s if self.num_machines > 1 else losses.reduce_s
        quantizing = losses.fp8_layer_s * layers if self.layer_bits == FP8_BITS else 0.0
        return losses.host_s(batch, layers) + quantizing + self._num_sums * each

    def _sending_s(self, rows: float) -> float:
        """Return the seconds that the sums of so many rows travel between machines."""
        if self.num_machines == 1:
            return 0.0
        num_bytes = self._num_sums * rows * self.shape.hidden * ACTIVATION_BYTES
        # Each machine sends and receives so much of what is summed, through all its GPUs.
        share = 2 * (self.num_machines - 1) / self.num_machines
        return share * num_bytes / (self.machine_gpus * NETWORK_BANDWIDTH)

    @property
    def _flops(self) -> float:
        """Operations per second that large products reach on them."""
        return self.num_at_once * self.gpu.flops * COMPUTE_SHARE

    @property
    def _num_sums(self) -> int:
        """Number of a step's sums over GPUs: two a layer, the embeddings', and the logits."""
        return 2 * self.shape.layers + 2 if self.num_at_once > 1 else 0


def group_sizes(replica: Replica, num_sequences: int) -> list[int]:
    """Return the `GROUP_SIZES` that a model can be split over and that hold the sequences."""
    groups = (replace(replica, num_gpus=size) for size in GROUP_SIZES)
    return [
        group.num_gpus
        for group in groups
        if not (group.shape.find_undivided(group.num_at_once) or group.unpackable)
        and group.max_sequences >= num_sequences
    ]
