# SPDX-License-Identifier: Apache-2.0
"""Small-M matmuls, computed as transposed products, against fp64."""

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
from megatron.core.ops.matmul import small_m
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
    small_m.add_linear_(out, x, weight)
    torch.testing.assert_close(out.double(), 2 * expected, rtol=1e-5, atol=2e-4)


def test_transposed_product_is_used_for_few_rows_only() -> None:
    weight, long_rows = torch.ones(512, 512), torch.ones(64, 4096)
    with one_thread():
        assert [
            n for n in range(8) if small_m.uses_transposed_product(torch.ones(n, 512), weight)
        ] == [1, 2, 3, 4]
        assert [
            n for n in range(8) if small_m.uses_transposed_product(torch.ones(n, 4096), long_rows)
        ] == [2, 3]
    x = torch.ones(2, 512)
    assert not small_m.uses_transposed_product(x, weight[:8])
    assert not small_m.uses_transposed_product(x.double(), weight.double())
    with mock.patch.object(small_m, "is_mkl_on_amd", return_value=False):
        assert not small_m.uses_transposed_product(x, weight)


def test_cpu_vendor_is_read_from_proc_cpuinfo(tmp_path: Path) -> None:
    for name in ("AuthenticAMD", "GenuineIntel", ""):
        cpuinfo = tmp_path / f"{name}.txt"
        cpuinfo.write_text(f"processor : 0\nvendor_id\t: {name}\nmodel : 1\n", encoding="utf-8")
        assert cpu_vendor(cpuinfo) == name
    assert cpu_vendor(tmp_path / "none") == ""


def test_generation_uses_small_m_matmul() -> None:
    groups, tokens = ProcessGroupCollection.single(), []
    model = GPTModel(FAMILIES["gqa"], groups, dtype=torch.float32, seed=3)
    for min_elements in (small_m.MIN_ELEMENTS, 1):
        with (
            mock.patch.object(small_m, "MIN_ELEMENTS", min_elements),
            mock.patch.object(
                small_m, "_transposed_product", wraps=small_m._transposed_product
            ) as transposed_product,
        ):
            engine = engine_of(model)
            engine.runner.model = InferenceOptimizedModel(model)
            tokens.append([c.tokens for (c,) in generate(engine, requests()[:2])])
        assert (transposed_product.call_count > 0) == (min_elements == 1)
    assert tokens[0] == tokens[1]
