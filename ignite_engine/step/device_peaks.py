"""What devices compute at most: dense matrix products, by dtype."""

from __future__ import annotations

import re

import torch

T = 1e12

# FLOP/s without sparsity, of fp16 with sums in fp32. Source: NVIDIA's data sheet of each, and for the GeForce cards and
# RTX A6000 the white papers of their architectures (Ada, appendix A; GA102, appendix A). Where a sheet gives figures
# with sparsity only, these are half of them. The first pattern that fits the device's name counts.
_PEAKS: dict[str, dict[str, float]] = {
    r"H(100|200) NVL": {"fp32": 60 * T, "tf32": 417.5 * T, "bf16": 835.5 * T, "fp16": 835.5 * T},
    r"H100 PCIe": {"fp32": 51 * T, "tf32": 378 * T, "bf16": 756.5 * T, "fp16": 756.5 * T},
    r"(H100|H200|GH200)": {"fp32": 67 * T, "tf32": 494.5 * T, "bf16": 989.5 * T, "fp16": 989.5 * T},
    r"A100": {"fp32": 19.5 * T, "tf32": 156 * T, "bf16": 312 * T, "fp16": 312 * T},
    r"A40": {"fp32": 37.4 * T, "tf32": 74.8 * T, "bf16": 149.7 * T, "fp16": 149.7 * T},
    r"A30": {"fp32": 10.3 * T, "tf32": 82 * T, "bf16": 165 * T, "fp16": 165 * T},
    r"A10": {"fp32": 31.2 * T, "tf32": 62.5 * T, "bf16": 125 * T, "fp16": 125 * T},
    r"L40S": {"fp32": 91.6 * T, "tf32": 183 * T, "bf16": 362.05 * T, "fp16": 362.05 * T},
    r"L40": {"fp32": 90.5 * T, "tf32": 90.5 * T, "bf16": 181.05 * T, "fp16": 181.05 * T},
    r"L4": {"fp32": 30.3 * T, "tf32": 60 * T, "bf16": 121 * T, "fp16": 121 * T},
    r"V100S-PCIE": {"fp32": 16.4 * T, "fp16": 130 * T},
    r"V100-SXM2": {"fp32": 15.7 * T, "fp16": 125 * T},
    r"V100-PCIE": {"fp32": 14 * T, "fp16": 112 * T},
    r"T4": {"fp32": 8.1 * T, "fp16": 65 * T},
    r"RTX 4090(?! D)": {"fp32": 82.6 * T, "tf32": 82.6 * T, "bf16": 165.2 * T, "fp16": 165.2 * T},
    r"RTX 3090(?! Ti)": {"fp32": 35.6 * T, "tf32": 35.6 * T, "bf16": 71 * T, "fp16": 71 * T},
    r"RTX A6000": {"fp32": 38.7 * T, "tf32": 77.4 * T, "bf16": 154.8 * T, "fp16": 154.8 * T},
}
_OTHER_VARIANTS = re.compile(r"MIG|Laptop|Max-Q")  # a part of a device, or one that is clocked lower
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def peak_flops(device_name: str, dtype: torch.dtype, *, tf32: bool = False) -> float | None:
    """FLOP/s at most, of dense matrix products.

    Args:
        device_name: as :func:`ignite_engine.devices.name_of` gives it.
        dtype: of the factors.
        tf32: products in float32 may be computed in TF32.

    Returns:
        None: the device is not in the table, or has no products of this dtype.
    """
    name = _NAMES.get(dtype)
    if name is None or _OTHER_VARIANTS.search(device_name):
        return None
    for pattern, peaks in _PEAKS.items():
        if re.search(rf"(?<![\w]){pattern}(?![\w])", device_name):
            return peaks.get("tf32", peaks["fp32"]) if tf32 and name == "fp32" else peaks.get(name)
    return None
