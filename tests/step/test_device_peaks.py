"""Devices are found by the names that torch gives them, and no other variant is taken for one of the table."""

from __future__ import annotations

import pytest
import torch

from ignite_engine.step.device_peaks import peak_flops


@pytest.mark.parametrize(
    ("name", "bf16", "fp32", "tf32"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5, 67, 494.5),
        ("NVIDIA H100 PCIe", 756.5, 51, 378),
        ("NVIDIA H100 NVL", 835.5, 60, 417.5),
        ("NVIDIA H200", 989.5, 67, 494.5),
        ("NVIDIA GH200 480GB", 989.5, 67, 494.5),
        ("NVIDIA A100-SXM4-80GB", 312, 19.5, 156),
        ("NVIDIA A100 80GB PCIe", 312, 19.5, 156),
        ("NVIDIA A10", 125, 31.2, 62.5),
        ("NVIDIA L4", 121, 30.3, 60),
        ("NVIDIA L40S", 362.05, 91.6, 183),
        ("Tesla V100-SXM2-16GB", None, 15.7, 15.7),
        ("Tesla T4", None, 8.1, 8.1),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6, 82.6),
    ],
)
def test_peaks_are_those_of_the_data_sheets(name: str, bf16: float | None, fp32: float, tf32: float) -> None:
    tera = [
        None if value is None else value / 1e12
        for value in (
            peak_flops(name, torch.bfloat16),
            peak_flops(name, torch.float32),
            peak_flops(name, torch.float32, tf32=True),
        )
    ]
    assert tera == pytest.approx([bf16, fp32, tf32]) if bf16 else tera == [None, fp32, tf32]


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A10G",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA H20",
        "NVIDIA A1000",
        "AMD Instinct MI300X",
    ],
)
def test_what_is_not_in_the_table_has_no_peak(name: str) -> None:
    assert peak_flops(name, torch.bfloat16) is None


def test_a_dtype_without_products_has_no_peak() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", torch.float64) is None
    assert peak_flops("Tesla V100-SXM2-16GB", torch.float16) == 125e12
