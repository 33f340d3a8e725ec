"""The kernels of layers in Triton's interpreter against torch's operations, which specify them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.activations import GELUTanh, SiLUActivation
from triton.runtime import interpreter

from rapid.engines.attention import ragged as attention
from rapid.engines.attention.batch import Feed, assemble
from rapid.engines.attention.kernel_inputs import AttentionInputs, Kernels
from rapid.engines.forward.layers import decoder, layer_kernels
from rapid.engines.forward.layers.layer_kernels import LayerKernels
from rapid.engines.forward.layers.layer_operations import LayerOperations, try_out
from rapid.engines.forward.linear.products import (
    FP8_CAPABILITY,
    Product,
    Rows,
    ScaledRows,
    quantize,
    quantize_weight,
)
from rapid.engines.kv.cache import KVCache, KVLayout, PageRun, PageTable
from tests.rapid.engines.forward.layers.test_decoder import model_of
from tests.rapid.speculation.fast.test_step_counts import Launches
from tests.rapid.tiny_families import MORE_FAMILIES, family_checkpoint, family_model
from tests.rapid.tiny_models import random_prompt

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HAS_FP8 = DEVICE == CPU or torch.cuda.get_device_capability() >= FP8_CAPABILITY
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
interpreted = pytest.mark.skipif(DEVICE != CPU, reason="kernels run on a CPU in the interpreter")
KERNELS = ("_add_norm", "_store_heads", "_gate")
FORMATS = {"bf16": BF16, "fp8e4nv": torch.float8_e4m3fn}


@pytest.fixture(autouse=True)
def _rounding_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cuts digits off where a device rounds to bfloat16 and fp8: round as torch."""
    convert = interpreter._convert_float

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if source != tl.float32 or str(target) not in FORMATS:
            return convert(data, source, target, mode)
        numbers = torch.from_numpy(np.ascontiguousarray(data)).to(FORMATS[str(target)])
        as_bits = torch.uint8 if numbers.itemsize == 1 else torch.uint16
        return numbers.view(as_bits).numpy().reshape(data.shape)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


@pytest.fixture
def _scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are quantized for products with fp8 weights on this device, as they are on a GPU."""
    is_fp8 = property(lambda product: product.weight.dtype == torch.float8_e4m3fn)
    monkeypatch.setattr(Product, "is_of_scaled_rows", is_fp8)


def assert_near(got: Rows, expected: Rows) -> None:
    """Check that numbers differ by two roundings at most, since sums have another order."""
    assert isinstance(expected, torch.Tensor)
    if isinstance(got, ScaledRows):
        largest = expected.abs().amax(-1).float().clamp_min(1e-12)
        torch.testing.assert_close(got.scale, largest / 448, rtol=0.01, atol=0)
        got = (got.numbers.float() * got.scale[:, None]).to(got.dtype)
        torch.testing.assert_close(got, expected, rtol=0.07, atol=float(largest.max()) / 448 / 512)
        return
    assert got.dtype == expected.dtype
    rounding = {BF16: 2**-6, F16: 2**-9, F32: 1e-5}[got.dtype]
    # Rotated numbers are differences of larger ones.
    atol = rounding / 4 * float(expected.abs().max())
    torch.testing.assert_close(got, expected, rtol=rounding, atol=atol)


def check_norms(seed: int) -> None:
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    dtype = [BF16, F16, F32][random.integers(3)]
    norm_dtype = [dtype, F32][random.integers(2)]
    rows, width = int(random.integers(1, 5)), int(random.integers(1, 40) * 16)
    size = 10.0 ** random.integers(-3, 3)
    hidden, added = ((torch.randn(rows, width) * size).to(dtype) for _ in range(2))
    weight, after = ((1 + torch.randn(width) / 3).to(norm_dtype) for _ in range(2))
    plain = LayerOperations(4, 2, 16, 10.0 ** -random.integers(5, 7))
    kernels = LayerKernels(4, 2, 16, plain.epsilon)
    into = None
    if dtype == BF16 and HAS_FP8 and random.integers(2):
        into = Product(*quantize_weight(torch.randn(16, width).bfloat16(), "fp8"))
    for parts in ((None, None), (added, None), (added, after)):
        got = kernels.add_norm(hidden, *parts, weight, into)
        expected = plain.add_norm(hidden, *parts, weight)
        assert_near(got[0], expected[0])
        assert_near(got[1], expected[1])


def check_heads(seed: int) -> None:
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    dtype = [BF16, F16, F32][random.integers(3)]
    head_dim = int(random.choice([64, 80, 96, 128, 256]))
    kv_heads, group = int(random.integers(1, 4)), int(random.integers(1, 6))
    shape = (kv_heads * group, kv_heads, head_dim, 1e-6)
    plain, kernels = LayerOperations(*shape), LayerKernels(*shape)
    rows, rotated = int(random.integers(1, 5)), int(random.choice([head_dim, head_dim // 2]))
    mixed = (3 * torch.randn(rows, (shape[0] + 2 * kv_heads) * head_dim)).to(dtype)
    turns = torch.randn(rows, 1, rotated // 2)
    cos, sin = torch.cat([turns.cos()] * 2, -1), torch.cat((-turns.sin(), turns.sin()), -1)
    qk_norm = None
    if random.integers(2):
        weights = 1 + torch.randn(shape[0] + kv_heads, head_dim) / 3
        qk_norm = weights.to([dtype, F32][random.integers(2)])
    is_fp8 = HAS_FP8 and bool(random.integers(2))
    centre = torch.randn(kv_heads, head_dim).to(dtype) if random.integers(2) else None
    if is_fp8:
        mixed[0, -head_dim:] *= 1e3  # beyond what fp8 keeps
    slots = torch.tensor(random.permutation(12)[:rows].tolist())
    num_ring_slots = int(random.choice([0, 20]))
    found = []
    for operations in (plain, kernels):
        sliding = (False, True)
        layout = KVLayout(kv_heads, head_dim, dtype, (DEVICE,) * 2, is_fp8, 8, sliding)
        cache = KVCache(layout, 3, 4, [None, centre], num_ring_slots)
        for stack in cache.stacks:
            stack.view(torch.uint8).fill_(1)
        given = (mixed, (cos.to(dtype), sin.to(dtype)), qk_norm, cache, 1, slots)
        found.append(operations.store_heads(*given))
    expected, got = found
    for ours, own in zip(got, expected, strict=True):
        if is_fp8 and own is not expected[0]:  # sums in another order may round to a neighbour
            torch.testing.assert_close(ours, own, rtol=1 / 8, atol=2**-4)
            assert qk_norm is not None or dtype == F32 or torch.equal(ours, own)
        else:
            assert_near(ours, own)
    others = [slot for slot in range(num_ring_slots or 12) if slot not in slots]
    for kept, read in zip(cache.layers[1], got[1:], strict=True):
        assert torch.equal(kept[:, slots].to(dtype), read[0])
        bits = kept.view(torch.uint8)[:, others]
        assert torch.equal(bits, torch.ones_like(bits))


def check_gates(seed: int) -> None:
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    dtype = [BF16, F16, F32][random.integers(3)]
    rows, width = int(random.integers(1, 5)), int(random.integers(1, 200) * 16)
    both = (3 * torch.randn(rows, 2 * width)).to(dtype)
    both[0, :3] = torch.tensor([-100.0, 0.0, 100.0])
    shape = (4, 2, 16, 1e-6)
    plain, kernels = LayerOperations(*shape), LayerKernels(*shape)
    into = Product(torch.randn(16, width).to(dtype))
    if dtype == BF16 and HAS_FP8 and random.integers(2):
        into = Product(*quantize_weight(into.weight, "fp8"))
    for activation in (SiLUActivation(), GELUTanh(), torch.nn.ReLU()):
        with np.errstate(over="ignore"):  # infinity divides to 0, as on a device
            got = kernels.gate(both, activation, into)
        assert_near(got, plain.gate(both, activation, into))
    assert_near(kernels.prepare(both, into), both)


CHECKS = (check_norms, check_heads, check_gates)


@pytest.mark.usefixtures("_scaled")
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("check", CHECKS)
def test_a_kernel_computes_what_torch_does(check: Any, seed: int) -> None:
    with DEVICE:
        check(seed)


@pytest.mark.slow
@pytest.mark.usefixtures("_scaled")
def test_kernels_compute_what_torch_does_at_200_random_shapes() -> None:
    for seed, check in itertools.product(range(1000, 1200), CHECKS):
        with DEVICE:
            check(seed)


# --- whole layers ---------------------------------------------------------------------------------


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoders compute with the kernels, as they do on CUDA."""

    def choose(self: Any, head_dim: int) -> LayerOperations:
        shape = (self._num_heads, self._num_kv_heads, head_dim, self._config.rms_norm_eps)
        return LayerKernels(*shape)

    monkeypatch.setattr(decoder.Decoder, "_choose_operations", choose)


def hidden_states(model: Any, cache: KVCache) -> torch.Tensor:
    computed = decoder.decoder_of(model)
    assert computed is not None
    prompt, table = random_prompt(40).tolist(), PageTable([PageRun(1, 12)], 4)
    found = []
    for start, stop in ((0, 6), (6, 9), (9, 10)):
        batch = assemble([Feed(prompt[start:stop], start, table, 1)], cache, CPU)
        with torch.inference_mode():
            found.append(computed(batch.input_ids, batch.position_ids, batch.rows))
    return torch.cat(found, 1)


@interpreted
@pytest.mark.parametrize("family", [*MORE_FAMILIES, "llama", "qwen3"])
def test_layers_of_every_family_are_those_of_torch(
    family: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if family in MORE_FAMILIES:
        model = family_model(family_checkpoint(family)).model
    else:
        model = model_of(family)
    settings: Any = model.config
    head_dim = model.model.layers[0].self_attn.head_dim
    num_layers = settings.num_hidden_layers
    layout = KVLayout(settings.num_key_value_heads, head_dim, F32, (CPU,) * num_layers)
    expected = hidden_states(model, KVCache(layout, 12, 4))
    request.getfixturevalue("_kernels")
    got = hidden_states(model, KVCache(layout, 12, 4))
    assert not torch.equal(got, expected)  # sums have another order
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)


def launches_of(kind: str, num_layers: int, method: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the operations of a forward over two rows, counting attention as one."""
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    }[kind]
    config = config_class(
        hidden_size=64, intermediate_size=128, num_hidden_layers=num_layers, head_dim=32,
        num_attention_heads=2, num_key_value_heads=1, vocab_size=64, pad_token_id=None,
    )  # fmt: skip
    model = model_class._from_config(config, attn_implementation=attention.NAME, dtype=BF16)
    model = model.eval().requires_grad_(False)
    if method:
        quantize(model, method, CPU)
    computed = decoder.decoder_of(model)
    assert computed is not None

    def attend(inputs: AttentionInputs) -> torch.Tensor:
        return inputs.query.new_zeros(inputs.query.transpose(1, 2).shape)  # one launch

    cache = KVCache(KVLayout(1, 32, BF16, (CPU,) * num_layers), 8, 16)
    feeds = [Feed([1], 20, PageTable([PageRun(first, first + 4)], 16), 1) for first in (0, 4)]
    batch = assemble(feeds, cache, CPU, Kernels(attend, attend, attend))
    launches = Launches()
    with monkeypatch.context() as patch:
        for name in KERNELS:
            patch.setattr(layer_kernels, name, launches.counting(getattr(layer_kernels, name)))
        with torch.inference_mode(), launches:
            computed(batch.input_ids, batch.position_ids, batch.rows)
    return launches.count


@interpreted
@pytest.mark.usefixtures("_kernels", "_scaled")
@pytest.mark.parametrize(
    ("kind", "method", "expected"),
    [("llama", None, 9), ("qwen3", None, 9), ("gemma3", None, 9), ("llama", "fp8", 10)],
)
def test_a_layer_is_four_launches_beside_attention_and_products(
    kind: str, method: Any, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    two, three = (launches_of(kind, number, method, monkeypatch) for number in (2, 3))
    assert three - two == expected


# --- which operations an engine computes with -----------------------------------------------------

SHAPE = (4, 2, 16, 1e-6)


@pytest.mark.gpu
def test_kernels_are_right_on_a_gpu() -> None:
    for dtype, norm_dtype in ((BF16, BF16), (BF16, F32), (F16, F16), (F32, F32)):
        plain = LayerOperations(32, 8, 128, 1e-5)
        assert decoder.layer_kernels_of(plain, DEVICE, dtype, norm_dtype, 4096, 128) is not None


@interpreted
def test_kernels_are_taken_that_do_the_same() -> None:
    plain = LayerOperations(*SHAPE)
    decoder.layer_kernels_of.cache_clear()
    assert isinstance(decoder.layer_kernels_of(plain, CPU, BF16, BF16, 48, 16), LayerKernels)
    assert len(try_out(plain, CPU, BF16, F32, 48, 16)) == 27


@interpreted
@pytest.mark.parametrize("is_right_everywhere", [False, True])
def test_all_ranks_of_a_model_take_kernels_or_none_does(is_right_everywhere: bool) -> None:
    model: Any = model_of("qwen3")
    computed = decoder.decoder_of(model)
    assert computed is not None
    claims: list[bool] = []

    def agree(claim: bool) -> bool:
        claims.append(claim)
        return claim and is_right_everywhere

    there = {"is_cuda": True, "device": CPU, "dtype": F32, "shape": (96, 32)}
    computed._tokens = SimpleNamespace(**there)  # type: ignore[assignment]
    computed._place = SimpleNamespace(group=SimpleNamespace(all=agree))  # type: ignore[assignment]
    is_taken = isinstance(computed._choose_operations(16), LayerKernels)
    assert claims == [True]
    assert is_taken == is_right_everywhere


@interpreted
@pytest.mark.parametrize("broken", ["add_norm", "store_heads", "gate"])
@pytest.mark.parametrize("is_raised", [False, True])
def test_kernels_that_are_wrong_or_fail_are_left_out_with_a_warning(
    broken: str,
    is_raised: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    right = getattr(LayerKernels, broken)

    def wrong(self: LayerKernels, first: torch.Tensor, *rest: Any) -> Any:
        if is_raised:
            raise RuntimeError("out of resources")
        return right(self, 1.3 * first, *rest)

    monkeypatch.setattr(LayerKernels, broken, wrong)
    decoder.layer_kernels_of.cache_clear()
    assert decoder.layer_kernels_of(LayerOperations(*SHAPE), CPU, F32, F32, 48, 16) is None
    assert ("fail" if is_raised else "disagree") in caplog.text
    decoder.layer_kernels_of.cache_clear()
