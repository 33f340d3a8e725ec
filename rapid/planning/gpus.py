"""GPUs with the numbers of their datasheets, which bound a step."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from rapid.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class GPU:
    """The limits of a GPU that bound a step."""

    name: str
    memory: float  # bytes
    bandwidth: float  # bytes per second
    flops: float  # dense bfloat16 operations per second, summed in float32
    source: str
    has_fp8_products: bool = False  # capability 9.0 or later, which `quantization: fp8` asks for


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("a100-40gb", 40e9, 1.555e12, 312e12, "NVIDIA A100 40GB SXM datasheet"),
        GPU("a100-80gb", 80e9, 2.039e12, 312e12, "NVIDIA A100 80GB SXM datasheet"),
        GPU("h100-sxm", 80e9, 3.35e12, 989e12, "NVIDIA H100 SXM datasheet", has_fp8_products=True),
        GPU("h100-pcie", 80e9, 2.0e12, 756e12, "NVIDIA H100 PCIe datasheet", has_fp8_products=True),
        GPU("h100-nvl", 94e9, 3.9e12, 835e12, "NVIDIA H100 NVL datasheet", has_fp8_products=True),
        GPU("h200", 141e9, 4.8e12, 989e12, "NVIDIA H200 SXM datasheet", has_fp8_products=True),
        # An eighth of the whole machine: 1,440 GB, 64 TB/s, 36 PFLOPS with sparsity.
        GPU("b200", 180e9, 8.0e12, 2250e12, "NVIDIA DGX B200 datasheet", has_fp8_products=True),
        GPU("l40s", 48e9, 0.864e12, 362e12, "NVIDIA L40S datasheet"),
        GPU("l4", 24e9, 0.3e12, 121e12, "NVIDIA L4 datasheet"),
        GPU("a10g", 24e9, 0.6e12, 70e12, "NVIDIA A10G datasheet (AWS G5)"),
        GPU("rtx-4090", 24e9, 1.008e12, 165.2e12, "NVIDIA Ada architecture whitepaper"),
        GPU("rtx-6000-ada", 48e9, 0.96e12, 364.2e12, "NVIDIA RTX 6000 Ada datasheet"),
    )
}
# What a name that leaves the variant open means: the one that clouds mostly rent.
_USUAL = {"h100": "h100-sxm", "a100": "a100-80gb", "rtx-6000": "rtx-6000-ada", "4090": "rtx-4090"}


def find_gpu(name: str) -> GPU:
    """Return the GPU of a name, in upper or lower case and with or without hyphens.

    A name without its variant is the usual one, as ``h100`` is ``h100-sxm``.

    Raises:
        ConfigurationError: There is none; the message names those that are spelled alike.
    """
    names = {_plain(each): GPUS[each] for each in GPUS}
    names |= {_plain(each): GPUS[usual] for each, usual in _USUAL.items()}
    if (found := names.get(_plain(name))) is not None:
        return found
    near = [names[each].name for each in get_close_matches(_plain(name), names, n=3)]
    did_you_mean = f"did you mean {' or '.join(dict.fromkeys(near))}? " if near else ""
    raise ConfigurationError(
        f"no GPU {name!r} is known: {did_you_mean}take one of {', '.join(GPUS)}"
    )


def _plain(name: str) -> str:
    return "".join(each for each in name.lower().removeprefix("nvidia") if each.isalnum())
