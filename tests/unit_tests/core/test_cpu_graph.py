# SPDX-License-Identifier: Apache-2.0
"""Replays of a CpuGraph against another call of the captured function."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from megatron.core.cpu_graph import CaptureError, CpuGraph
from tests.support.ranks import run_ranks

X, WEIGHT = torch.randn(3, 8), torch.randn(8, 8)
INDICES, COUNTS = torch.tensor([0, 2]), torch.zeros(4, dtype=torch.int64)


def products() -> tuple[torch.Tensor, ...]:
    y = F.linear(X, WEIGHT)
    out = torch.empty(3, 8)
    torch.mm(y, WEIGHT.t(), out=out)
    return (out.add_(y, alpha=0.5).addmm_(X, WEIGHT), torch.einsum("ab,cb->ac", X, WEIGHT))


def views() -> tuple[torch.Tensor, ...]:
    left, right = X.clone().chunk(2, -1)
    left.mul_(2).add_(right)
    return left.mT, right.reshape(-1), left.unsqueeze(0).expand(2, 3, 4).reshape(6, 4)


def multiple_outputs() -> tuple[torch.Tensor, ...]:
    return (*torch.native_layer_norm(X, (8,), None, None, 1e-5), *X.topk(2), *X.max(0))


def dtypes() -> tuple[torch.Tensor, ...]:
    low = X.to(torch.bfloat16)
    return low.float() + 1, (X * 4).long() // 3, X.gt(0).where(X > -1, False), low.sum(-1)


def indexing() -> tuple[torch.Tensor, ...]:
    rows = torch.zeros(4, 8)
    rows.index_copy_(0, INDICES + 1, X[:2])
    rows[INDICES] += 1
    return rows, F.embedding(INDICES, X), X.index_select(0, INDICES), torch.arange(3) * X.sum()


def constants() -> tuple[torch.Tensor, ...]:
    """Create tensors from Python numbers and write to them."""
    return torch.tensor(1.0).add_(X.sum()), X.new_tensor([1.0, 2.0]).mul_(X.mean())


def irregular_signatures() -> tuple[torch.Tensor, ...]:
    """Call torch functions whose defaults or names differ from the operator's."""
    values, indices = torch.empty(8), torch.empty(8, dtype=torch.int64)
    torch.max(X, 0, out=(values, indices))
    integers = (X * 9).long()
    return F.mse_loss(X, X * 2), integers << 1, integers >> 1, values, indices, X.softmax(-1)


def empty_tensors() -> tuple[torch.Tensor, ...]:
    return X[:0].softmax(-1), X[:0].topk(0)[0]


@pytest.mark.parametrize(
    "function",
    [
        products,
        views,
        multiple_outputs,
        dtypes,
        indexing,
        constants,
        irregular_signatures,
        empty_tensors,
    ],
)
@torch.no_grad()
def test_replay_is_bitwise_equal_to_the_function(
    function: Callable[[], tuple[torch.Tensor, ...]],
) -> None:
    graph, results = CpuGraph(), []
    graph.capture(lambda: results.extend(function()))
    before = [t.clone() for t in results]
    for _ in range(3):
        X.normal_()
        INDICES.copy_(torch.randperm(3)[:2])
        graph.replay()
        actual = [t.clone() for t in results]
        expected = function()
        for a, b in zip(actual, expected, strict=True):
            assert a.dtype is b.dtype
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    if function is not empty_tensors:
        assert not all(torch.equal(a, b) for a, b in zip(before, actual, strict=True))


READS: dict[str, Callable[[], object]] = {
    "item": lambda: X.sum().item(),
    "condition": lambda: bool(X.sum() > 0),
    "tolist": lambda: COUNTS.tolist(),
    "numpy": lambda: X.numpy(),
    "nonzero": lambda: X.nonzero(),
    "equal": lambda: torch.equal(X, WEIGHT),
    "boolean mask": lambda: X[X > 0],
    "dlpack": lambda: X.__dlpack__(),
    "repeats": lambda: X.repeat_interleave(INDICES.new_tensor([1, 0, 2]), 0),
}


@pytest.mark.parametrize("kind", READS)
def test_reading_a_value_on_the_host_is_refused(kind: str) -> None:
    with pytest.raises(CaptureError, match="returns a value to the host"):
        CpuGraph().capture(READS[kind])
    READS[kind]()  # the failed capture has left no interception behind


def test_graph_captures_once_and_replays_only_after_capture() -> None:
    graph = CpuGraph()
    with pytest.raises(CaptureError, match="before its capture has ended"):
        graph.replay()
    with pytest.raises(CaptureError, match="returns a value to the host"):
        graph.capture(lambda: X.mul(2).sum().item())
    with pytest.raises(CaptureError, match="before its capture has ended"):
        graph.replay()
    with pytest.raises(CaptureError, match="records once"):
        graph.capture(lambda: None)


def test_random_numbers_are_refused() -> None:
    with pytest.raises(CaptureError, match="draws random numbers"):
        CpuGraph().capture(lambda: torch.empty(3).normal_())


def capture_all_reduce(rank: int, world: int) -> str:
    with pytest.raises(CaptureError) as error:
        CpuGraph().capture(lambda: torch.distributed.all_reduce(torch.ones(1)))
    torch.distributed.barrier()
    return str(error.value)


def test_a_collective_is_refused() -> None:
    for message in run_ranks(capture_all_reduce, 2):
        assert "is a collective" in message


@torch.no_grad()
def test_eager_calls_run_again_at_each_replay() -> None:
    """An eager call reads current values; the operations before and after it are recorded."""
    x, length, out, calls = torch.ones(4), torch.tensor([2]), torch.empty(1), []

    def eager_sum() -> None:
        calls.append(length.tolist()[0])
        out.copy_(doubled[: calls[-1]].sum())

    graph, results = CpuGraph(), []

    def run() -> None:
        nonlocal doubled
        doubled = x * 2
        graph.call(eager_sum)
        eager_value = graph.call_for(lambda: doubled[: length.item()].sum())
        results.extend((out + 1, eager_value + 1))

    doubled = x
    graph.capture(run)
    assert calls == [2]
    assert [r.item() for r in results] == [5, 5]
    x.fill_(3)
    length.fill_(4)
    graph.replay()
    assert calls == [2, 4]
    assert [r.item() for r in results] == [25, 25]
