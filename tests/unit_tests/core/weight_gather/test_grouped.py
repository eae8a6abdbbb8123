# SPDX-License-Identifier: Apache-2.0
"""Grouped linear layers, one matrix per run of rows, against fp64 products row by row."""

from __future__ import annotations

import pytest
import torch

from megatron.core import InitSpec, ProcessGroupCollection, RankGrid, WeightSharding
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.weight_gather import RowRuns, WeightHandle, WeightStore, grouped_linear
from megatron.core.weight_sharding import SubWeight
from tests.support.closeness import assert_all_close, assert_close_by_metric
from tests.support.inputs import generator
from tests.support.nan_memory import nan_memory
from tests.support.ranks import run_ranks
from tests.unit_tests.core.distributed.engine_steps import slice_box

#: bf16 rounds operands and results of each product (2^-9); sums are in fp32.
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 1.5e-2}
RUNS, F, H = 4, 5, 6
#: Rows of each run in two microbatches, with runs that are empty in the first, later or always.
COUNTS = {
    "uneven": ((3, 1, 7, 2), (1, 5, 2, 4)),
    "empty first": ((0, 4, 0, 3), (2, 1, 6, 0)),
    "empty always": ((3, 0, 7, 0), (1, 0, 2, 0)),
    "one run": ((0, 0, 9, 0), (0, 8, 0, 0)),
    "no rows, then some": ((0, 0, 0, 0), (1, 2, 0, 3)),
}
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class GradientCounter:
    """A gradient sink whose main_grad buffers are NaN until they are written."""

    def __init__(self, *handles: WeightHandle) -> None:
        self.handles, self.num_accumulated = handles, 0
        for handle in handles:
            handle.gradients = self

    def alloc_main_grads(self) -> None:
        for handle in self.handles:
            handle.main_grad = torch.full(handle.shape, torch.nan)

    def grad_accumulated(self, handle: WeightHandle) -> None:
        self.num_accumulated += 1


def declare_weights(store: WeightStore) -> tuple[WeightHandle, WeightHandle]:
    """Declare gate and up, fused per expert [2 RUNS, F, H], and down [RUNS, H, F]."""
    sub_weights = [SubWeight(name=name, shape=(RUNS, F, H), shards=()) for name in ("gate", "up")]
    fused = WeightSharding(
        name="gate_up", sub_weights=tuple(sub_weights), interleave=RUNS, expert=True
    )
    down = WeightSharding.of("down", (RUNS, H, F), expert=True)
    return tuple(store.declare(s, InitSpec.normal(0.5)) for s in (fused, down))


def build_store(
    dtype: torch.dtype = torch.float32,
) -> tuple[WeightStore, WeightHandle, GradientCounter]:
    """Return a single-process store, its fused weight and the weight's gradient sink."""
    store = WeightStore(ProcessGroupCollection.single(), seed=4, dtype=dtype)
    handle, down = declare_weights(store)
    store.materialize()
    return store, handle, GradientCounter(handle, down)


def values(*shape: int, key: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normal values."""
    return torch.randn(shape, generator=generator(8, key, *shape)).to(dtype)


def runs_of(counts: tuple[int, ...]) -> RowRuns:
    return RowRuns.of(torch.tensor(counts))


def reference_by_row(
    weight: torch.Tensor, x: torch.Tensor, grad: torch.Tensor, counts: tuple
) -> Gradients:
    """Return y, dx and dW in fp64 from matrices [RUNS, o, h], one matrix copied per row."""
    weight, x, grad = (t.detach().double() for t in (weight, x, grad))
    run_of_row = torch.arange(RUNS).repeat_interleave(torch.tensor(counts))
    row_weights = weight[run_of_row]  # [r, o, h]
    row_gradients = grad.unsqueeze(2) * x.unsqueeze(1)  # [r, o, h]
    d_weight = torch.stack([row_gradients[run_of_row == e].sum(0) for e in range(RUNS)])
    return (
        (row_weights @ x.unsqueeze(2)).squeeze(2),
        (grad.unsqueeze(1) @ row_weights).squeeze(1),
        d_weight,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", COUNTS)
def test_grouped_linear_matches_fp64_over_two_microbatches(dtype, case):
    _, handle, sink = build_store(dtype)
    weight = handle.get().view(RUNS, 2 * F, H)
    total = torch.zeros_like(weight, dtype=torch.float64)
    with nan_memory():
        for key, counts in enumerate(COUNTS[case]):
            rows = sum(counts)
            x = values(rows, H, key=key, dtype=dtype).requires_grad_()
            grad = values(rows, 2 * F, key=key, dtype=dtype)
            out = grouped_linear(handle, x, runs_of(counts))
            out.backward(grad)
            expected, dx, dw = reference_by_row(weight, x, grad, counts)
            total += dw
            assert (out.dtype, x.grad.dtype) == (dtype, dtype)
            assert_close_by_metric("output", out, expected, bound=BOUNDS[dtype])
            assert_close_by_metric("input gradient", x.grad, dx, bound=BOUNDS[dtype])
    d_weight = handle.main_grad.view_as(total)
    assert (sink.num_accumulated, handle.main_grad.dtype, handle.anchor.grad) == (
        2,
        torch.float32,
        None,
    )
    assert_close_by_metric("weight gradient", d_weight, total, bound=BOUNDS[dtype])
    unused = [e for e, pair in enumerate(zip(*COUNTS[case], strict=True)) if not any(pair)]
    assert d_weight[unused].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_trailing_rows_do_not_affect_results(dtype):
    _, handle, _ = build_store(dtype)
    weight = handle.get().view(RUNS, 2 * F, H)
    counts, rows = (2, 0, 4, 1), 7
    x, grad = (values(rows + 5, width, key=3, dtype=dtype) for width in (H, 2 * F))
    x[rows:], grad[rows:] = torch.nan, torch.nan
    x.requires_grad_()
    with nan_memory():
        out = grouped_linear(handle, x, RowRuns.of(torch.tensor(counts), trailing=True))
        out.backward(grad)
    expected, dx, dw = reference_by_row(weight, x[:rows], grad[:rows], counts)
    assert out.shape == grad.shape
    assert_close_by_metric("output", out[:rows], expected, bound=BOUNDS[dtype])
    assert_close_by_metric("input gradient", x.grad[:rows], dx, bound=BOUNDS[dtype])
    assert_close_by_metric("weight gradient", handle.main_grad.view_as(dw), dw, bound=BOUNDS[dtype])


def test_fused_weight_rows_are_gate_then_up_per_expert():
    store, handle, _ = build_store()
    views = {}
    for box in store.boxes(handle):
        view = handle.get().view(-1)[box.start : box.start + box.numel].view(box.sizes)
        views.setdefault(box.name, []).append(view)
    gate, up = (torch.cat(views[name]) for name in ("gate", "up"))
    x, counts = values(7, H, key=3), (2, 0, 4, 1)
    out = grouped_linear(handle, x, runs_of(counts))
    run_of_row = torch.arange(RUNS).repeat_interleave(torch.tensor(counts))
    for half, weight in zip(out.chunk(2, -1), (gate, up), strict=True):
        expected = torch.einsum("rfh,rh->rf", weight[run_of_row].double(), x.double())
        assert_close_by_metric("half", half, expected, bound=1e-6)


def test_expanded_output_gradients_are_accepted():
    _, handle, _ = build_store()
    x, runs = values(7, H, key=5).requires_grad_(), runs_of((2, 0, 4, 1))
    grouped_linear(handle, x, runs).sum().backward()
    d_x, d_weight = x.grad.clone(), handle.main_grad.clone()
    x.grad, handle.overwrite_main_grad = None, True
    grouped_linear(handle, x, runs).backward(torch.ones(7, 2 * F))
    assert torch.equal(x.grad, d_x)
    assert torch.equal(handle.main_grad, d_weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deferred_wgrad_is_bit_equal_to_immediate_wgrad(dtype):
    (_, immediate, _), (store, deferred, sink) = build_store(dtype), build_store(dtype)
    for key, counts in enumerate(COUNTS["empty first"]):
        x = values(sum(counts), H, key=key, dtype=dtype)
        grad = values(sum(counts), 2 * F, key=key, dtype=dtype)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        grouped_linear(immediate, a, runs_of(counts)).backward(grad)
        out = grouped_linear(deferred, b, runs_of(counts))
        with store.defer() as queue:
            out.backward(grad)
        assert (len(queue), sink.num_accumulated) == (1, key)
        assert torch.equal(a.grad, b.grad)
        queue.drain()
    assert torch.equal(immediate.main_grad, deferred.main_grad)


def test_frozen_experts_pass_gradients_on_and_save_nothing():
    (_, handle, _), (_, frozen, sink) = build_store(), build_store()
    frozen.anchor.requires_grad_(False)
    x, runs = values(7, H, key=5), runs_of((2, 0, 4, 1))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    grouped_linear(handle, a, runs).square().sum().backward()
    out = grouped_linear(frozen, b, runs)
    assert out.grad_fn.saved_tensors == (None,)
    out.square().sum().backward()
    assert torch.equal(a.grad, b.grad)
    assert (sink.num_accumulated, frozen.main_grad) == (0, None)


def test_mismatched_shapes_are_named():
    _, handle, _ = build_store()
    for x, counts, message in (
        (torch.ones(3, H), (1, 1, 0, 0), r"gate_up: runs of 2 rows for x \(3, 6\)"),
        (torch.ones(2, H + 1), (1, 1, 0, 0), r"gate_up \[8, 5, 6\] must be \[4 · c, o/c, 7\]"),
        (torch.ones(2, H), (1, 1, 0), r"must be \[3 · c, o/c, 6\], one matrix for each of 3 runs"),
    ):
        with pytest.raises(ValueError, match=message):
            grouped_linear(handle, x, runs_of(counts))


def two_layers(handles: tuple[WeightHandle, WeightHandle], rank: int) -> Gradients:
    """Run a rank's rows through both weights and back; return output, input gradient and rows."""
    counts = ((3, 0, 4, 1), (0, 5, 2, 2))[rank]
    x = values(sum(counts), H, key=10 + rank).requires_grad_()
    inner = grouped_linear(handles[0], x, runs_of(counts))
    out = grouped_linear(handles[1], inner[:, :F] * torch.tanh(inner[:, F:]), runs_of(counts))
    out.backward(values(len(x), H, key=20 + rank))
    return out.detach(), x.grad, x.detach()


def compare_shards_with_full_weights(rank: int, world: int, strategy: str) -> dict[str, int]:
    """Compare sharded weights with full weights in a single-process store."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    config = DataParallelConfig(strategy=strategy)
    store = WeightStore(groups, seed=4)
    handles = declare_weights(store)
    store.materialize(config.storage())
    engine = DataParallel(store, groups, config=config)
    engine.begin_step()
    engine.set_is_last_backward(True)
    local_results = two_layers(handles, rank)
    engine.finish()

    single = WeightStore(ProcessGroupCollection.single(), seed=4)
    full_weights = declare_weights(single)
    single.materialize()
    GradientCounter(*full_weights)
    reference_results = [two_layers(full_weights, r) for r in range(world)]
    for name, got, ref in zip(
        ("output", "input gradient"), local_results, reference_results[rank], strict=False
    ):
        assert torch.equal(got, ref), name
    expected = {}
    for handle in full_weights:
        for box in single.boxes(handle):
            expert_gradient = handle.main_grad.view(-1)[box.start : box.start + box.numel].view(
                box.sizes
            )
            expected.setdefault(box.name, []).append(expert_gradient)
    expected = {name: torch.cat(expert_gradients) for name, expert_gradients in expected.items()}
    pairs = {}
    for owned in engine.owned():
        for i, placed in enumerate(owned.boxes):
            name = f"{placed.name}.{i}"
            pairs[name] = placed.of(owned.gradients), slice_box(expected[placed.name], placed.box)
    assert_all_close({n: a for n, (a, _) in pairs.items()}, {n: b for n, (_, b) in pairs.items()})
    return {
        "held": sum(b.data.numel() for b in store.buckets),
        "compared": sum(b.numel() for _, b in pairs.values()),
    }


def test_sharded_expert_weights_match_full_weights():
    numel = 3 * RUNS * F * H
    unsharded_ranks = run_ranks(compare_shards_with_full_weights, 2, "no_shard")
    assert all(
        counts["held"] >= numel and counts["compared"] == numel for counts in unsharded_ranks
    )
    sharded_ranks = run_ranks(compare_shards_with_full_weights, 2, "optim_grads_params")
    assert all(counts["held"] < 0.8 * numel for counts in sharded_ranks)
    assert sum(counts["compared"] for counts in sharded_ranks) == numel
