"""The peak that MFU is relative to: a GPU's peak, by whole words of its name."""

from __future__ import annotations

import pytest

from bucketline.train.compile import peak_flops


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 3090 Ti", 80),
        ("NVIDIA GeForce RTX 5090", 210),
        ("NVIDIA RTX A6000", 155),
        ("NVIDIA RTX 6000 Ada Generation", 364),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 504),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),
        ("NVIDIA T4", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA RTX A6000 Laptop GPU", None),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA L40G", None),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H100 PCIe MIG 2g.20gb", None),
        ("NVIDIA RTX 6000 Ada Generation Laptop GPU", None),
        ("NVIDIA RTX 5000 Ada Generation", None),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 4090 SUPER", None),
        ("NVIDIA GeForce RTX 3090 Laptop GPU", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_the_peak_is_that_of_the_whole_name(name: str, tflops: float | None) -> None:
    assert peak_flops(name) == (None if tflops is None else tflops * 1e12)
