# SPDX-License-Identifier: Apache-2.0
"""The ops of experts on the GPU against fp64: permutations, grouped products, and dropped
tokens."""

from __future__ import annotations

import pytest
import torch

from megatron.core import Group, InitSpec, ProcessGroupCollection, WeightSharding
from megatron.core.moe.dispatch import ExpertRanks, dispatch
from megatron.core.moe.router import Routing
from megatron.core.ops import grouped_mm as products
from megatron.core.ops.permutation import Permutation, sum_rows, take_rows
from megatron.core.weight_gather import RowRuns, WeightHandle, WeightStore, grouped_linear
from tests.support import gpu_agreement
from tests.support.closeness import assert_close_by_metric
from tests.support.gpu_agreement import BOUND, REHEARSES, sized
from tests.support.nan_memory import nan_memory

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", gpu_agreement.DTYPES, ids=str)
TOKENS, EXPERTS = sized(3000, 17), 8


def random_tensor(
    device: torch.device, *shape: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device).to(dtype)


@DTYPES
@pytest.mark.parametrize(
    ("copies", "dropped"), [(1, 0), (2, sized(700, 5)), (6, 0), (8, sized(5000, 30))]
)
def test_permutations_match_fp64(device, dtype, copies, dropped):
    features = 1096  # more than a block, not a multiple of it
    generator = torch.Generator(device).manual_seed(copies)
    order = torch.randperm(TOKENS * copies, generator=generator, device=device)
    permutation = Permutation.of(order[dropped:], TOKENS, copies)
    x = random_tensor(device, TOKENS, features, dtype=dtype)
    weights = random_tensor(device, TOKENS, copies)
    grad_out = random_tensor(device, TOKENS, features + 1, dtype=dtype)[:, 1:]  # not contiguous

    def run(implementation, kind):
        leaf = x.to(kind, copy=True).requires_grad_()
        factors = weights.to(torch.promote_types(kind, torch.float32), copy=True).requires_grad_()
        options = {"implementation": implementation}
        rows = take_rows(leaf, permutation, **options)
        plain = sum_rows(rows, permutation, **options)
        out = sum_rows(rows, permutation, weights=factors, **options)
        torch.autograd.backward((plain, out), (grad_out.to(kind), grad_out.to(kind)))
        return rows, plain, out, leaf.grad, factors.grad

    with nan_memory():
        kernel_tensors = run("triton", dtype)
    pairs = kernel_tensors, run("reference", torch.float64)
    names = ("rows", "sums", "weighted sums", "input gradient", "weight gradient")
    for name, actual, expected in zip(names, *pairs, strict=True):
        assert_close_by_metric(name, actual, expected, bound=BOUND[dtype])
    zeros = int((pairs[0][4] == 0).sum())
    assert zeros == dropped


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


@DTYPES
@pytest.mark.parametrize(("width", "features"), [(384, 256), (38, 31)])
def test_grouped_linear_matches_fp64(device, dtype, width, features, monkeypatch):
    kernels = []
    product = torch.nn.functional.grouped_mm

    def counted(*arguments, **options):
        kernels.append(1)
        return product(*arguments, **options)

    monkeypatch.setattr(products.F, "grouped_mm", counted)
    store = WeightStore(ProcessGroupCollection.single(), seed=4, dtype=dtype, device=device)
    sharding = WeightSharding.of("w", (EXPERTS, width, features), expert=True)
    handle = store.declare(sharding, InitSpec.normal(0.1))
    store.materialize()
    Slot(handle)
    weight = handle.get().double()
    total = torch.zeros_like(weight)
    for counts in ((0, 130, 7, 500, 0, 64, 1, 298), (10, 0, 3, 0, 900, 77, 5, 5)):
        rows = sum(counts)
        x = random_tensor(device, rows, features, dtype=dtype).requires_grad_()
        grad = random_tensor(device, rows, width, dtype=dtype)
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
    """Raise on device synchronization, except in a rehearsal."""
    if not REHEARSES:
        torch.cuda.set_sync_debug_mode("error")
    yield
    if not REHEARSES:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.machine
@DTYPES
@pytest.mark.parametrize("width", [256, 250])
@pytest.mark.parametrize("dropping", [False, True])
def test_expert_forward_and_backward_do_not_sync(device, dtype, width, dropping, no_host_reads):
    store = WeightStore(ProcessGroupCollection.single(), seed=4, dtype=dtype, device=device)
    sharding = WeightSharding.of("w", (EXPERTS, width, width), expert=True)
    handle = store.declare(sharding, InitSpec.normal(0.1))
    store.materialize()
    Slot(handle)
    x = random_tensor(device, TOKENS, width, dtype=dtype).requires_grad_()
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
    out.backward(random_tensor(device, TOKENS, width, dtype=dtype))
    if not REHEARSES:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(handle.main_grad.isfinite().all())


@DTYPES
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_dropped_tokens_match_fp64(device, dtype, share):
    """Rows of dropped tokens follow the last run and are uninitialized."""
    features, copies = 256, 2
    store = WeightStore(ProcessGroupCollection.single(), seed=4, dtype=dtype, device=device)
    sharding = WeightSharding.of("w", (EXPERTS, features, features), expert=True)
    handle = store.declare(sharding, InitSpec.normal(0.1))
    store.materialize()
    Slot(handle)
    generator = torch.Generator(device).manual_seed(6)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator, device=device)
    chosen = scores.topk(copies).indices
    keep_mask = torch.rand(TOKENS, copies, generator=generator, device=device) >= share
    x = random_tensor(device, TOKENS, features, dtype=dtype).requires_grad_()
    weights = random_tensor(device, TOKENS, copies).requires_grad_()
    grad_out = random_tensor(device, TOKENS, features + 1, dtype=dtype)[:, 1:]
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
