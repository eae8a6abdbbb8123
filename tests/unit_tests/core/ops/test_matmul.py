# SPDX-License-Identifier: Apache-2.0
"""The kernel of a weight: its choice, and the products of AMD CPUs against fp64."""

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
from megatron.core.ops.matmul import PLAIN, amd_cpu, choose_kernel, onednn
from tests.support.inputs import generator
from tests.unit_tests.core.inference.test_engine import FAMILIES, engine_of, requests


@pytest.fixture(autouse=True)
def amd_cpu_with_mkl() -> Iterator[None]:
    """Pretend to run MKL on an AMD CPU."""
    with mock.patch.object(amd_cpu, "is_mkl_on_amd", return_value=True):
        yield


@pytest.mark.parametrize("features", [512, 1024, 1536])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 17])
def test_products_of_amd_cpus_match_fp64(rows: int, features: int) -> None:
    source = generator(rows)
    x, weight, bias = (
        torch.randn(*shape, generator=source)
        for shape in ((rows, features), (300, features), (300,))
    )
    expected = x.double() @ weight.double().t()
    out = torch.full((rows, 300), torch.nan)
    assert amd_cpu.linear(x, weight, out=out) is out
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-4)
    assert torch.equal(amd_cpu.linear(x, weight), out)
    with_bias = amd_cpu.linear(x.view(rows, 1, features), weight, bias).double()
    torch.testing.assert_close(with_bias[:, 0], expected + bias, rtol=1e-5, atol=2e-4)
    amd_cpu.add_product_(out, x, weight)
    torch.testing.assert_close(out.double(), 2 * expected, rtol=1e-5, atol=4e-4)


def test_few_rows_of_few_features_are_multiplied_transposed() -> None:
    for features, transposed_rows in ((512, [1, 2, 3, 4]), (1024, [1, 2, 3]), (1536, [])):
        weight = torch.ones(8, features)
        batches, transposed = [torch.ones(n, features) for n in range(1, 8)], []
        for x in batches:
            with mock.patch.object(
                amd_cpu, "onednn_linear", wraps=amd_cpu.onednn_linear
            ) as onednn_linear:
                amd_cpu.linear(x, weight)
            if not onednn_linear.called:
                transposed.append(len(x))
        assert transposed == transposed_rows


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

    assert kernel((512, 512), fp32).linear is amd_cpu.linear
    assert kernel((8, 512), fp32) is kernel((512, 512), fp64) is kernel((512, 512), bf16) is PLAIN
    with mock.patch.object(amd_cpu, "is_mkl_on_amd", return_value=False):
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


def test_generation_uses_the_products_of_amd_cpus() -> None:
    groups, tokens = ProcessGroupCollection.single(), []
    for min_elements in (amd_cpu.MIN_ELEMENTS, 1):
        with (
            mock.patch.object(amd_cpu, "MIN_ELEMENTS", min_elements),
            mock.patch.object(
                amd_cpu, "_transposed_product", wraps=amd_cpu._transposed_product
            ) as transposed_product,
        ):
            model = GPTModel(FAMILIES["gqa"], groups, dtype=torch.float32, seed=3)
            engine = engine_of(model)
            engine.runner.model = InferenceOptimizedModel(model)
            tokens.append([c.tokens for (c,) in generate(engine, requests()[:2])])
        assert (transposed_product.call_count > 0) == (min_elements == 1)
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("packed", [False, True])
def test_onednn_is_not_used_if_its_product_is_wrong(packed: bool) -> None:
    agrees = onednn.agrees.__wrapped__
    assert agrees(24, 64, torch.float32, packed=packed)
    for wrong in (lambda x, _: x.new_zeros(len(x), 24), mock.Mock(side_effect=RuntimeError)):
        with mock.patch.object(onednn, "onednn_linear", wrong):
            assert not agrees(24, 64, torch.float32, packed=packed)
