# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls, and the experts' layers over them, against products of single rows in fp64."""

from __future__ import annotations

import pytest
import torch

from megatron.core import Group, InitSpec, ProcessGroupCollection, WeightSharding
from megatron.core.moe.dispatch import ExpertRanks, dispatch
from megatron.core.moe.router import Routing
from megatron.core.ops import grouped_mm as products
from megatron.core.ops.grouped_mm import RowRuns, grouped_mm, grouped_wgrad_, naive
from megatron.core.weight_gather import WeightHandle, WeightStore, grouped_linear
from tests.support import gpu_agreement
from tests.support.closeness import assert_close_by_metric
from tests.support.gpu_agreement import BOUND, REHEARSES, random_tensor, sized, use_launches
from tests.support.nan_memory import nan_memory

KERNELS = pytest.mark.gpu
DTYPES = pytest.mark.parametrize("dtype", gpu_agreement.DTYPES, ids=str)
TOKENS, EXPERTS = sized(3000, 17), 8
#: Rows of each run: less than a tile, whole and partial tiles, and none, in either order.
COUNTS = ((3, 0, 37, 16, 0), (0, 17))
M, N = 35, 19


@pytest.fixture
def tiles_of_16(monkeypatch):
    """Use tiles so small that runs have several tiles and sums several steps."""
    names = ("PRODUCT", "PRODUCT_FP32", "WGRAD", "WGRAD_FP32")
    tile = {"ROWS": 16, "COLUMNS": 16, "INNER": 16, "num_warps": 1, "num_stages": 1}
    use_launches(monkeypatch, "grouped_mm", names, **tile)


def operands(backend, counts, trailing):
    """Return x [r, M], g [r, N], matrices [runs, M, N] and runs; rows after the last are NaN."""
    total = sum(counts)
    shapes = (total + trailing, M), (total + trailing, N), (len(counts), M, N)
    x, grad, matrices = (t.to(backend.dtype) for t in backend.random(*shapes))
    x[total:], grad[total:] = torch.nan, torch.nan
    runs = RowRuns.of(torch.tensor(counts, device=backend.device), trailing=trailing > 0)
    return x, grad, matrices, runs


@pytest.mark.parametrize("trailing", [0, 19])
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_mm_matches_its_equation(backend, tiles_of_16, trailing, transposed):
    for counts in COUNTS:
        x, _, matrices, runs = operands(backend, counts, trailing)
        argument = matrices.transpose(1, 2).contiguous() if transposed else matrices
        options = {"transposed": transposed, "implementation": backend.implementation}
        with nan_memory():
            out = grouped_mm(x, argument, runs, **options)
        assert (out.shape, out.dtype) == ((len(x), N), backend.dtype)
        expected = naive.grouped_mm(x.double(), matrices.double(), counts)
        bound = backend.bounds[backend.dtype]
        assert_close_by_metric("output", out[: sum(counts)], expected, bound=bound)


@pytest.mark.parametrize("trailing", [0, 19])
def test_weight_gradients_are_overwritten_or_accumulated(backend, tiles_of_16, trailing):
    """The reference is autograd's gradient of the equation; sums are not rounded to bf16."""
    dtype = torch.promote_types(backend.dtype, torch.float32)
    on_cpu = backend.implementation == "reference"
    for counts in COUNTS:
        x, grad, _, runs = operands(backend, counts, trailing)
        matrices = torch.zeros(len(counts), M, N, dtype=torch.float64, device=x.device)
        out = naive.grouped_mm(x.double(), matrices.requires_grad_(), counts)
        (expected,) = torch.autograd.grad(out, matrices, grad[: sum(counts)].double())
        total = torch.full((len(counts), N, M), torch.nan, dtype=dtype, device=x.device)
        for overwrite, times in ((True, 1), (False, 2), (False, 3)):
            grouped_wgrad_(
                total, grad, x, runs, overwrite=overwrite, implementation=backend.implementation
            )
            bound = backend.bounds[backend.dtype if on_cpu else torch.float32]
            assert_close_by_metric("weights", total, times * expected.mT, bound=bound)
            assert not total[[count == 0 for count in counts]].any()


def test_runs_without_rows_have_zero_gradients(backend):
    x, grad, matrices, runs = operands(backend, (0, 0, 0), 0)
    implementation = backend.implementation
    assert grouped_mm(x, matrices, runs, implementation=implementation).shape == (0, N)
    total = torch.full((3, N, M), torch.nan, device=x.device)
    grouped_wgrad_(total, grad, x, runs, overwrite=True, implementation=implementation)
    assert not total.any()


@KERNELS
def test_weight_gradient_is_rounded_once_to_fp16_buffer(device, tiles_of_16):
    backend = gpu_agreement.Backend("triton", device, torch.float16)
    x, grad, _, runs = operands(backend, COUNTS[0], 0)
    fp32_total = torch.empty(len(COUNTS[0]), N, M, device=device)
    fp16_total = fp32_total.half()
    for total in (fp32_total, fp16_total):
        grouped_wgrad_(total, grad, x, runs, overwrite=True, implementation="triton")
    assert torch.equal(fp16_total, fp32_total.half())


class Slot:
    """A gradient sink whose main grad is NaN until it is written."""

    def __init__(self, handle: WeightHandle) -> None:
        self.handle = handle
        handle.gradients = self

    def alloc_main_grads(self) -> None:
        self.handle.main_grad = torch.full(
            self.handle.shape, torch.nan, device=self.handle.get().device
        )

    def grad_accumulated(self, handle: WeightHandle) -> None:
        """Do nothing."""


def expert_weight(device, dtype, width, features):
    """Return the handle of the experts' weight, with a NaN main grad."""
    store = WeightStore(ProcessGroupCollection.single(), seed=4, dtype=dtype, device=device)
    sharding = WeightSharding.of("w", (EXPERTS, width, features), expert=True)
    handle = store.declare(sharding, InitSpec.normal(0.1))
    store.materialize()
    Slot(handle)
    return handle


@KERNELS
@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize(("width", "features"), [(384, 256), (38, 31)])
def test_grouped_linear_matches_fp64(device, dtype, width, features, monkeypatch):
    kernels = []
    product = torch.nn.functional.grouped_mm

    def counted(*arguments, **options):
        kernels.append(1)
        return product(*arguments, **options)

    monkeypatch.setattr(products.F, "grouped_mm", counted)
    handle = expert_weight(device, dtype, width, features)
    weight = handle.get().double()
    total = torch.zeros_like(weight)
    for counts in ((0, 130, 7, 500, 0, 64, 1, 298), (10, 0, 3, 0, 900, 77, 5, 5)):
        rows = sum(counts)
        x = random_tensor(device, rows, features).to(dtype).requires_grad_()
        grad = random_tensor(device, rows, width).to(dtype)
        runs = RowRuns.of(torch.tensor(counts, device=device))
        out = grouped_linear(handle, x, runs)
        out.backward(grad)
        per_expert = zip(
            weight, x.detach().double().split(counts), grad.double().split(counts), strict=True
        )
        ys, dxs, dws = zip(*((a @ w.t(), b @ w, b.t() @ a) for w, a, b in per_expert), strict=True)
        assert_close_by_metric("output", out, torch.cat(ys), bound=BOUND[dtype])
        assert_close_by_metric("input gradient", x.grad, torch.cat(dxs), bound=BOUND[dtype])
        total += torch.stack(dws)
    # On a GPU the sums of bf16 products reach the main grad unrounded.
    assert_close_by_metric(
        "weight gradient", handle.main_grad, total, bound=sized(2e-5, BOUND[dtype])
    )
    aligned = dtype is torch.bfloat16 and features % 8 == 0 and not REHEARSES
    uses_torch = aligned and torch.cuda.get_device_capability(device)[0] in (9, 10)
    assert len(kernels) == (4 if uses_torch else 0)


@pytest.fixture
def no_host_reads():
    """Raise on device synchronization."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@KERNELS
@pytest.mark.machine
@DTYPES
@pytest.mark.parametrize("width", [256, 250])
@pytest.mark.parametrize("dropping", [False, True])
def test_expert_forward_and_backward_do_not_sync(device, dtype, width, dropping, no_host_reads):
    handle = expert_weight(device, dtype, width, width)
    x = random_tensor(device, TOKENS, width).to(dtype).requires_grad_()
    chosen = random_tensor(device, TOKENS, EXPERTS).topk(2).indices
    weights = random_tensor(device, TOKENS, 2).requires_grad_()
    keep_mask = random_tensor(device, TOKENS, 2) > 0 if dropping else None
    out = dispatch(
        x,
        Routing(chosen, weights, keep_mask),
        lambda rows, runs: grouped_linear(handle, rows, runs),
        ranks=ExpertRanks(Group.single("etp_ep"), 1, EXPERTS),
        dispatcher="alltoall",
    )
    out.backward(random_tensor(device, TOKENS, width).to(dtype))
    torch.cuda.set_sync_debug_mode("default")
    assert bool(handle.main_grad.isfinite().all())


@KERNELS
@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_dropped_tokens_match_fp64(device, dtype, share):
    """Rows of dropped tokens follow the last run and are uninitialized."""
    features, copies = 256, 2
    handle = expert_weight(device, dtype, features, features)
    generator = torch.Generator(device).manual_seed(6)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator, device=device)
    chosen = scores.topk(copies).indices
    keep_mask = torch.rand(TOKENS, copies, generator=generator, device=device) >= share
    x = random_tensor(device, TOKENS, features).to(dtype).requires_grad_()
    weights = random_tensor(device, TOKENS, copies).requires_grad_()
    grad_out = random_tensor(device, TOKENS, features + 1).to(dtype)[:, 1:]
    with nan_memory():
        out = dispatch(
            x,
            Routing(chosen, weights, keep_mask),
            lambda rows, runs: grouped_linear(handle, rows, runs),
            ranks=ExpertRanks(Group.single("etp_ep"), 1, EXPERTS),
            dispatcher="alltoall",
        )
        out.backward(grad_out)
    leaves = [t.detach().double().requires_grad_() for t in (x, weights, handle.get())]
    factors = (leaves[1] * keep_mask).unsqueeze(-1)  # [t, k, 1]
    products = torch.einsum(
        "teo,tke->tko",
        torch.einsum("th,eoh->teo", leaves[0], leaves[2]),
        torch.nn.functional.one_hot(chosen, EXPERTS).double(),
    )
    expected = (factors * products).sum(1)
    expected.backward(grad_out.double())
    actual_tensors = (out, x.grad, weights.grad, handle.main_grad)
    names = ("output", "input gradient", "gradient of weights", "weight gradient")
    for name, actual, reference in zip(
        names, actual_tensors, (expected, *(t.grad for t in leaves)), strict=True
    ):
        if share == 1.0:
            assert not actual.any(), name
        else:
            assert_close_by_metric(name, actual, reference, bound=BOUND[dtype])
