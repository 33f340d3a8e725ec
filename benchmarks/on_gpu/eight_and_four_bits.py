"""Products with quantized weights, and steps with keys and values in fp8."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.on_gpu.bench import Bench
from benchmarks.on_gpu.steps import serve
from rapid.engines.forward.linear import four_bits
from rapid.engines.forward.linear.products import FP8_CAPABILITY, Method, Product, quantize_weight


def quantized_products(bench: Bench) -> None:
    """Time gate and up of a 70B's layer by rows; check those of four bits, and what converts them.

    Beyond `MOST_PACKED_ROWS` weights of four bits are converted first. Both ways are timed.
    """
    bench.models.clear()
    bench.free_bytes()
    sizes = bench.plan.shapes["70B"]
    shape = (2 * sizes["intermediate_size"], sizes["hidden_size"])
    weight = (torch.randn(shape, device=bench.device) / 50).bfloat16()
    has_fp8 = not bench.is_cuda or torch.cuda.get_device_capability() >= FP8_CAPABILITY
    methods: tuple[Method, ...] = ("fp8", "int4") if has_fp8 else ("int4",)
    products = {method: Product(*quantize_weight(weight, method)) for method in methods}
    own, scales = products["int4"].weight, products["int4"].scale
    assert scales is not None
    packed_bytes = own.nbytes + scales.nbytes
    numbers = four_bits.numbers_of(*four_bits.codes_of(weight)).bfloat16()
    group = shape[1] // len(scales)
    report = bench.report["quantized products"] = []
    for num_rows in (1, 8, 64, 256, 512, 1024, bench.plan.chunk):
        bench.check_time(5, "quantized products")
        rows = torch.randn(num_rows, shape[1], device=bench.device).bfloat16()
        exact = Product(numbers)(rows).float()
        far = float((products["int4"](rows).float() - exact).norm() / exact.norm())
        times = {"bfloat16": bench.kernel_ms(partial(Product(weight), rows))}
        for method, product in products.items():
            times[method] = bench.kernel_ms(partial(product, rows))
        packed = partial(four_bits._multiply, rows, own, group, scales)
        converted = partial(four_bits.product_of_converted, rows, own, scales)
        times["int4, packed"] = bench.kernel_ms(packed)
        times["int4, converted"] = bench.kernel_ms(converted)
        report.append({"rows": num_rows, "ms": times, "int4 off by": far})
        if num_rows == 1:
            losses = bench.report.setdefault("losses", {})
            least = weight.nbytes / bench.peak()[0] * 1e3
            losses["weights_share"] = least / times["bfloat16"]
            losses["four_bits_share"] = least * packed_bytes / weight.nbytes / times["int4"]
        bench.say(
            f"{shape[0]} x {shape[1]} weights, {num_rows} rows",
            "; ".join(f"{name} {ms:.3f} ms" for name, ms in times.items())
            + f"; int4 {far:.1e} from its numbers",
            "int4 <= 1e-2 from its numbers",
            far <= 1e-2,
        )


def keys_in_fp8(bench: Bench) -> None:
    """Time steps of the 8B whose keys and values are kept in fp8."""
    bench.models.clear()
    bench.free_bytes()
    long = bench.plan.contexts[0]
    served = serve(bench, "8B", long, long, is_fp8=True)
    runner, least = served.runner(), served.least_ms(long, 1)
    report = bench.report["KV in fp8"] = {}
    for rows in (1, 8):
        bench.check_time(15, "KV in fp8")
        report[rows] = ms = bench.wall_ms(partial(runner.run, served.feeds(long, 1, rows)), warm=6)
        beside = bench.step_ms.get((long, 1, rows))
        told = f"; {beside:.2f} ms with KV in its dtype" if beside else ""
        bench.say(
            f"8B with KV in fp8, 1 x {long}, {rows} rows",
            f"{ms:.2f} ms = {least / ms:.0%} of the bytes' speed{told}",
        )
