# SPDX-License-Identifier: Apache-2.0
"""The kernel of a weight: its choice, and small-M matmuls against fp64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron.core import ProcessGroupCollection
from megatron.core.device import cpu_vendor
from megatron.core.inference import generate
from megatron.core.models import GPTModel, InferenceOptimizedModel
from megatron.core.ops.matmul import PLAIN, choose_kernel, small_m
from tests.support.inputs import generator, one_thread
from tests.unit_tests.core.inference.test_engine import FAMILIES, engine_of, requests


@pytest.fixture(autouse=True)
def slow_rows() -> Iterator[None]:
    """Pretend to run MKL on AMD, which multiplies rows one after the other."""
    with mock.patch.object(small_m, "is_mkl_on_amd", return_value=True):
        yield


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5])
def test_small_m_matmul_matches_fp64(rows: int) -> None:
    source = generator(rows)
    x = torch.randn(rows, 512, generator=source)
    weight = torch.randn(300, 512, generator=source)
    expected = x.double() @ weight.double().t()
    out = torch.full((rows, 300), torch.nan)
    assert small_m.linear(x, weight, out=out) is out
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(small_m.linear(x, weight), out)
    small_m.add_product_(out, x, weight)
    torch.testing.assert_close(out.double(), 2 * expected, rtol=1e-5, atol=2e-4)


def test_transposed_product_is_used_for_few_rows_only() -> None:
    with one_thread():
        for features, rows in ((512, [1, 2, 3, 4]), (4096, [2, 3])):
            batches = [torch.ones(n, features) for n in range(8)]
            assert [len(x) for x in batches if small_m.uses_transposed_product(x)] == rows


def test_kernel_of_a_weight_is_chosen_by_shape_dtype_and_cpu() -> None:
    fp32, fp64, bf16 = torch.float32, torch.float64, torch.bfloat16

    def kernel(shape, dtype, operand_dtype=None, product_dtype=None):
        return choose_kernel(
            shape,
            dtype,
            torch.device("cpu"),
            operand_dtype=operand_dtype or dtype,
            product_dtype=product_dtype or dtype,
        )

    assert kernel((512, 512), fp32).linear is small_m.linear
    assert kernel((8, 512), fp32) is kernel((512, 512), fp64) is kernel((512, 512), bf16) is PLAIN
    with mock.patch.object(small_m, "is_mkl_on_amd", return_value=False):
        assert kernel((512, 512), fp32) is PLAIN
    source = generator(5)
    x, weight, bias = (torch.randn(*n, generator=source) for n in ((3, 4, 16), (8, 16), (8,)))
    x, weight = x.bfloat16(), weight.bfloat16()
    expected = torch.nn.functional.linear(x.float(), weight.float(), bias).bfloat16()
    converted = kernel((8, 16), bf16, product_dtype=fp32)
    assert torch.equal(converted.linear(x, weight, bias), expected)
    out, total = torch.empty(3, 4, 8, dtype=bf16), torch.ones(4, 8)
    assert converted.linear(x, weight, bias, out=out) is out
    assert torch.equal(out, expected)
    converted.add_product_(total, x[0], weight)
    assert torch.equal(total, 1 + converted.linear(x[0], weight).float())


def test_cpu_vendor_is_read_from_proc_cpuinfo(tmp_path: Path) -> None:
    for name in ("AuthenticAMD", "GenuineIntel", ""):
        cpuinfo = tmp_path / f"{name}.txt"
        cpuinfo.write_text(f"processor : 0\nvendor_id\t: {name}\nmodel : 1\n", encoding="utf-8")
        assert cpu_vendor(cpuinfo) == name
    assert cpu_vendor(tmp_path / "none") == ""


def test_generation_uses_small_m_matmul() -> None:
    groups, tokens = ProcessGroupCollection.single(), []
    for min_elements in (small_m.MIN_ELEMENTS, 1):
        with (
            mock.patch.object(small_m, "MIN_ELEMENTS", min_elements),
            mock.patch.object(
                small_m, "_transposed_product", wraps=small_m._transposed_product
            ) as transposed_product,
        ):
            model = GPTModel(FAMILIES["gqa"], groups, dtype=torch.float32, seed=3)
            engine = engine_of(model)
            engine.runner.model = InferenceOptimizedModel(model)
            tokens.append([c.tokens for (c,) in generate(engine, requests()[:2])])
        assert (transposed_product.call_count > 0) == (min_elements == 1)
    assert tokens[0] == tokens[1]
