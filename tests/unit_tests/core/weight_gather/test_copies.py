# SPDX-License-Identifier: Apache-2.0
"""Products with low-bit copies of weights against products with the dequantized values."""

from __future__ import annotations

import pytest
import torch

from megatron.core.ops.matmul import low_bit
from megatron.core.ops.matmul.low_bit import CopyDtype, LowBitCopy
from megatron.core.ops.matmul.onednn import agrees
from tests.support.closeness import assert_close_by_metric
from tests.support.inputs import generator

ROWS = (1, 2, 3, 17, 40)
PACKS_BF16 = agrees(32, 32, torch.bfloat16, packed=True)


def weight_of(rows: int, features: int) -> torch.Tensor:
    """Return a matrix with rows of very different magnitudes and a row of zeros."""
    weight = torch.randn(rows, features, generator=generator(3, rows))
    weight *= torch.logspace(-6, 3, rows).unsqueeze(1)
    weight[rows // 2] = 0
    return weight


@pytest.mark.parametrize("features", [7, 24, 512])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_int8_rows_are_within_half_a_quantization_step(features: int, stored: torch.dtype) -> None:
    weight = weight_of(33, features).to(stored)
    copy = LowBitCopy(weight, "int8")
    scales, weight_fp64 = copy.scales[:33].double().unsqueeze(1), weight.double()
    difference = copy.dequantize(0, 33).double() - weight_fp64
    bounded = bool((difference.abs() <= scales / 2 * (1 + 1e-6)).all())
    assert bounded
    bounded = bool(
        (scales <= weight_fp64.abs().amax(1, keepdim=True) / 127 * (1 + 2**-6) + 1e-37).all()
    )
    assert bounded
    assert copy.values[33 // 2].count_nonzero() == 0
    expected = difference.norm() / weight_fp64.norm()
    assert copy.error(weight) == pytest.approx(float(expected), rel=1e-4)
    assert copy.nbytes == 64 * (-(-features // 32) * 32 + 2)


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
@pytest.mark.parametrize("cpu_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "features"), [(9, 7), (33, 24), (2100, 512)])
def test_low_bit_linear_multiplies_dequantized_values(
    dtype: CopyDtype, cpu_dtype: torch.dtype, rows: int, features: int
) -> None:
    weight = torch.randn(rows, features, generator=generator(5))
    bias = torch.randn(rows, generator=generator(6))
    copy = LowBitCopy(weight, dtype, cpu_dtype=cpu_dtype)
    values = weight.bfloat16().double()
    if copy.scales is not None:
        values = copy.values[:rows, :features].double()
        values *= copy.scales[:rows].double().unsqueeze(1)
    for tokens in ROWS:
        x = torch.randn(tokens, 1, features, generator=generator(7))
        expected = x.double() @ values.t() + bias
        output = copy.linear(x, None, bias)
        assert (output.dtype, output.shape) == (x.dtype, (tokens, 1, rows))
        # x and y are rounded to the 8 bits of bf16.
        assert_close_by_metric(f"{tokens} tokens", output, expected, bound=6e-3)


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
@pytest.mark.parametrize("cpu_dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_independent_of_the_number_of_rows(
    dtype: CopyDtype, cpu_dtype: torch.dtype
) -> None:
    weight, x = (torch.randn(n, 256, generator=generator(n)) for n in (96, 200))
    copy = LowBitCopy(weight, dtype, cpu_dtype=cpu_dtype)
    rows = torch.cat([copy.linear(row) for row in x.split(1)])
    for tokens in (2, 3, 17, 200):
        differing = (copy.linear(x[:tokens]) != rows[:tokens]).float().mean()
        # Another order of fp32 sums rarely changes a result in bf16.
        assert differing <= (0.01 if dtype == "bf16" else 0)


@pytest.mark.skipif(not PACKS_BF16, reason="this CPU or build of torch packs no bf16")
@pytest.mark.parametrize(("rows", "features"), [(9, 7), (2100, 512)])
def test_packed_copy_multiplies_the_same_values(
    rows: int, features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_bit, "matmul_dtype", lambda *_: torch.bfloat16)
    weight = torch.randn(rows, features, generator=generator(5))
    packed = LowBitCopy(weight, "bf16")
    monkeypatch.setattr(low_bit, "agrees", lambda *_, **__: False)
    plain = LowBitCopy(weight, "bf16")
    assert packed.packed
    assert packed.values.is_mkldnn
    assert not plain.packed
    assert packed.nbytes == plain.nbytes
    assert packed.error(weight) == plain.error(weight)
    assert torch.equal(packed.dequantize(2, 9), plain.dequantize(2, 9))
    for tokens in ROWS:
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(tokens, 2 * features, generator=generator(7)).to(dtype)[:, features:]
            expected = x.bfloat16().double() @ plain.values.double().t()
            assert_close_by_metric("packed", packed.linear(x), expected, bound=6e-3)


def test_int8_copies_are_never_packed() -> None:
    assert not LowBitCopy(torch.ones(32, 32), "int8").packed
