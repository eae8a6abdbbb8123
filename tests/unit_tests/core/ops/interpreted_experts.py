# SPDX-License-Identifier: Apache-2.0
"""The grouped matmuls of experts in Triton's interpreter against fp64 products by row."""

import pytest
import torch

from megatron.core.ops.grouped_mm import RowRuns, grouped_mm, grouped_wgrad_
from megatron.core.ops.grouped_mm import triton as kernels
from megatron.core.ops.launches import Launches
from tests.support.closeness import assert_close_by_metric
from tests.support.nan_memory import nan_memory
from tests.unit_tests.core.ops.formulas import maker

#: Rows of each run: less than a tile, whole and partial tiles, and none, in either order.
COUNTS = ((3, 0, 37, 16, 0), (0, 0, 0), (0, 17))
#: The interpreter has no bf16 matmuls.
BOUNDS = {torch.float32: 1e-6, torch.float16: 2.0**-11}
#: The dtype, and the number of rows after the last run.
CASES = pytest.mark.parametrize(("dtype", "trailing"), [(torch.float32, 0), (torch.float16, 19)])
M, N = 35, 19


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Use tiles so small that runs have several tiles and sums several steps."""
    tile = {"ROWS": 16, "COLUMNS": 16, "INNER": 16, "num_warps": 1, "num_stages": 1}
    for name in ("PRODUCT", "PRODUCT_FP32", "WGRAD", "WGRAD_FP32"):
        monkeypatch.setattr(kernels, name, Launches(name, tile))


def operands(counts, dtype, trailing):
    """Return x [r, M], g [r, N], matrices [runs, M, N] and runs; rows after the last are NaN."""
    make, total = maker(), sum(counts)
    x, grad = (make(total + trailing, width).to(dtype) for width in (M, N))
    x[total:], grad[total:] = torch.nan, torch.nan
    runs = RowRuns.of(torch.tensor(counts), trailing=trailing > 0)
    return x, grad, make(len(counts), M, N).to(dtype), runs


@CASES
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_mm_matches_fp64(dtype, trailing, transposed):
    for counts in COUNTS:
        x, _, matrices, runs = operands(counts, dtype, trailing)
        run_index = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        expected = torch.einsum(
            "rm,rmn->rn", x[: len(run_index)].double(), matrices[run_index].double()
        )
        matrices_arg = matrices.transpose(1, 2).contiguous() if transposed else matrices
        with nan_memory():
            out = grouped_mm(x, matrices_arg, runs, transposed=transposed, implementation="triton")
        assert (out.shape, out.dtype) == ((len(x), N), dtype)
        if len(run_index):
            assert_close_by_metric("output", out[: len(run_index)], expected, bound=BOUNDS[dtype])


@CASES
def test_weight_gradients_are_overwritten_or_accumulated(dtype, trailing):
    for counts in COUNTS:
        x, grad, _, runs = operands(counts, dtype, trailing)
        runs_of_rows = zip(
            *(t[: sum(counts)].double().split(list(counts)) for t in (grad, x)), strict=True
        )
        expected = torch.stack([g.t() @ rows for g, rows in runs_of_rows])
        total = torch.full((len(counts), N, M), torch.nan)
        for overwrite, times in ((True, 1), (False, 2), (False, 3)):
            grouped_wgrad_(total, grad, x, runs, overwrite=overwrite, implementation="triton")
            if not any(counts):
                assert not total.any()
                continue
            # the sums of fp16 products are not rounded to fp16
            assert_close_by_metric("weight gradient", total, times * expected, bound=1e-6)
            assert not total[[count == 0 for count in counts]].any()


def test_weight_gradient_is_rounded_once_to_fp16_buffer():
    x, grad, _, runs = operands(COUNTS[0], torch.float16, 0)
    fp32_total = torch.empty(len(COUNTS[0]), N, M)
    fp16_total = fp32_total.half()
    for total in (fp32_total, fp16_total):
        grouped_wgrad_(total, grad, x, runs, overwrite=True, implementation="triton")
    assert torch.equal(fp16_total, fp32_total.half())
