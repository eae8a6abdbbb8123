# SPDX-License-Identifier: Apache-2.0
"""Weight handles against autograd in fp64, with immediate and with deferred weight gradients."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from megatron.core import InitSpec, ProcessGroupCollection, WeightSharding
from megatron.core.weight_gather import WeightHandle, WeightStore
from tests.support.closeness import assert_close_by_metric
from tests.support.inputs import generator
from tests.support.nan_memory import nan_memory

#: bf16 rounds operands and results of each product (2^-9); sums are in fp32.
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 1.5e-2}
SHAPES = {"table": (11, 6), "weight": (5, 6), "bias": (5,), "scale": (6,)}


class GradientRecorder:
    """A gradient sink with one main_grad per weight that records every accumulation."""

    def __init__(self, store: WeightStore) -> None:
        self.store = store
        self.accumulated: list[tuple[str, bool]] = []
        self.num_allocations = 0
        for handle in store.handles.values():
            handle.gradients = self

    def alloc_main_grads(self) -> None:
        """Fill every main_grad with NaN, so that adding before the first write shows."""
        self.num_allocations += 1
        for handle in self.store.handles.values():
            if handle.trainable:
                handle.main_grad = torch.full(handle.shape, torch.nan)

    def grad_accumulated(self, handle: WeightHandle) -> None:
        """Record the accumulation."""
        self.accumulated.append((handle.name, handle.overwrite_main_grad))


def build_store(
    dtype: torch.dtype = torch.float32, *, record_gradients: bool = True
) -> WeightStore:
    """Return a store of four weights."""
    store = WeightStore(ProcessGroupCollection.single(), seed=4, dtype=dtype)
    for name, shape in SHAPES.items():
        store.declare(WeightSharding.of(name, shape), InitSpec.normal(0.7))
    store.materialize()
    if record_gradients:
        GradientRecorder(store)
    return store


def sink(store: WeightStore) -> GradientRecorder:
    """Return the gradient sink of a store."""
    gradient_sink = store.handles["table"].gradients
    assert isinstance(gradient_sink, GradientRecorder)
    return gradient_sink


def values(*shape: int, key: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normal values."""
    return torch.randn(shape, generator=generator(6, key, *shape)).to(dtype)


def reference_weights(store: WeightStore) -> dict[str, torch.Tensor]:
    """Return fp64 leaves of the same values."""
    return {n: h.get().double().requires_grad_(True) for n, h in store.handles.items()}


def network(store: WeightStore, ids: torch.Tensor, valid: torch.Tensor, x: torch.Tensor):
    """Return logits [4, 3, 11], using every entry point and the table twice."""
    use = store.handles
    rows = use["table"].embedding(ids, valid) + x
    hidden = rows * use["scale"].use(torch.float32).to(x.dtype)
    inner = use["weight"].linear(hidden, use["bias"])
    return use["table"].linear(F.pad(torch.tanh(inner), (0, 1), value=0.5))


def plain_network(weights, ids, valid, x):
    """Return the logits of the same network with plain autograd."""
    rows = F.embedding(ids, weights["table"]) * valid.unsqueeze(-1) + x
    hidden = rows * weights["scale"]
    inner = F.linear(hidden, weights["weight"], weights["bias"])
    return F.linear(F.pad(torch.tanh(inner), (0, 1), value=0.5), weights["table"])


def inputs(dtype: torch.dtype, key: int):
    """Return ids with repetitions, a mask, activations and an output gradient."""
    ids = torch.randint(0, 11, (4, 3), generator=generator(key))
    valid = torch.rand(4, 3, generator=generator(key, 1)) > 0.3
    return ids, valid, values(4, 3, 6, key=key, dtype=dtype), values(4, 3, 11, key=key, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_equal_autograd_over_two_microbatches(dtype: torch.dtype):
    store, bound = build_store(dtype), BOUNDS[dtype]
    weights = reference_weights(store)
    with nan_memory():
        for key in (1, 2):  # the first gradient overwrites main_grad, later gradients add
            ids, valid, x, grad = inputs(dtype, key)
            x.requires_grad_(True)
            out = network(store, ids, valid, x)
            out.backward(grad)
            x_fp64 = x.detach().double().requires_grad_(True)
            reference = plain_network(weights, ids, valid.double(), x_fp64)
            reference.backward(grad.double())
            assert out.dtype is dtype
            assert_close_by_metric("output", out, reference, bound=bound)
            assert_close_by_metric("input gradient", x.grad, x_fp64.grad, bound=bound)
    for name, handle in store.handles.items():
        assert not handle.overwrite_main_grad
        assert handle.anchor.grad is None
        assert handle.main_grad.dtype is torch.float32
        assert_close_by_metric(name, handle.main_grad, weights[name].grad, bound=bound)


@pytest.mark.parametrize("name", ["table", "weight", "bias", "scale"])
def test_first_gradient_of_a_step_overwrites_and_later_add(name: str):
    store = build_store()

    def accumulate() -> torch.Tensor:
        ids, valid, x, grad = inputs(torch.float32, 5)
        network(store, ids, valid, x).backward(grad)
        return store.handles[name].main_grad.clone()

    first_gradient = accumulate()
    assert_close_by_metric("twice", accumulate(), 2 * first_gradient, bound=1e-6)
    for handle in store.handles.values():
        handle.overwrite_main_grad = True
    assert torch.equal(accumulate(), first_gradient)


def test_first_embedding_gradient_writes_every_row():
    handle = build_store().handles["table"]
    ids, grad = torch.tensor([3, 7, 3]), (8 * values(3, 6)).round()  # sums are exact
    expected = torch.zeros(11, 6).index_add_(0, ids, grad)
    for factor in (1.0, 2.0):
        (handle.embedding(ids) * grad).sum().backward()
        assert torch.equal(handle.main_grad, factor * expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deferred_wgrad_is_bit_equal_to_immediate_wgrad(dtype: torch.dtype):
    immediate, deferred = build_store(dtype), build_store(dtype)
    for key in (1, 2):
        ids, valid, x, grad = inputs(dtype, key)
        a, b = x.clone().requires_grad_(True), x.clone().requires_grad_(True)
        network(immediate, ids, valid, a).backward(grad)
        loss = network(deferred, ids, valid, b)
        with deferred.defer() as queue:
            loss.backward(grad)
        assert len(queue) == 5, "table twice, weight, bias, scale"
        assert torch.equal(a.grad, b.grad)
        if key == 1:
            assert sink(deferred).num_allocations == 0, (
                "main_grads are allocated by the first deferred wgrad"
            )
        queue.drain()
        assert len(queue) == 0
    for name, handle in immediate.handles.items():
        assert torch.equal(handle.main_grad, deferred.handles[name].main_grad), name


def test_wgrads_are_not_deferred_after_an_error_in_defer():
    store = build_store()
    with pytest.raises(KeyError), store.defer():
        raise KeyError
    assert not any(handle.defers for handle in store.handles.values())


class _HoldReference(torch.autograd.Function):
    """The identity, whose node keeps an object alive."""

    @staticmethod
    def forward(ctx, x, referenced):
        ctx.referenced = referenced
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Referenced:
    """An object that supports weak references."""


def test_deferred_wgrads_keep_no_graph_alive():
    store = build_store()
    ids, valid, x, grad = inputs(torch.float32, 3)
    referenced = _Referenced()
    reference = weakref.ref(referenced)
    out = network(store, ids, valid, _HoldReference.apply(x.requires_grad_(True), referenced))
    with store.defer() as queue:
        out.backward(grad)
    del referenced, out, x
    gc.collect()
    assert len(queue) == 5
    assert reference() is None
    queue.drain()


def test_main_grad_does_not_alias_the_accumulated_gradient():
    store = build_store()
    handle, gradient = store.handles["scale"], values(6)
    private_copy = handle.use()
    private_copy.backward(gradient)
    handle.main_grad.zero_()
    assert gradient.abs().sum() > 0
    before = handle.get().clone()
    with torch.no_grad():
        private_copy.zero_()
    assert torch.equal(handle.get(), before), "use() must give a private copy"


def test_read_only_weight_is_a_view_that_takes_a_gradient():
    handle, gradient = build_store().handles["scale"], values(6)
    weight = handle.read_only()
    assert weight.data_ptr() == handle.unsharded_param.data_ptr()
    assert handle.unsharded_param.grad_fn is None, "a stored weight has no autograd history"
    weight.backward(gradient)
    assert torch.equal(handle.main_grad, gradient)
    weight_fp64 = handle.read_only(torch.float64)
    assert torch.equal(weight_fp64.detach(), handle.get().double())
    with torch.no_grad():
        assert handle.read_only() is handle.unsharded_param


@pytest.mark.parametrize("frozen", ["table", "weight", "bias", "scale"])
def test_frozen_weights_pass_gradients_on_and_get_none(frozen: str):
    store, reference = build_store(), build_store()
    handle = store.handles[frozen]
    handle.anchor.requires_grad_(False)
    handle.gradients = None
    ids, valid, x, grad = inputs(torch.float32, 7)
    a, b = x.clone().requires_grad_(True), x.clone().requires_grad_(True)
    network(store, ids, valid, a).backward(grad)
    network(reference, ids, valid, b).backward(grad)
    assert torch.equal(a.grad, b.grad)
    assert handle.main_grad is None
    for name, trained in store.handles.items():
        if name != frozen:
            assert torch.equal(trained.main_grad, reference.handles[name].main_grad)


def test_frozen_model_builds_no_graph_and_saves_nothing():
    store = build_store(record_gradients=False)
    store.freeze(*SHAPES)
    ids, valid, x, _ = inputs(torch.float32, 7)
    assert not network(store, ids, valid, x).requires_grad
    out = store.handles["weight"].linear(x.requires_grad_(True))
    assert out.grad_fn.saved_tensors == (None,)


def test_unmaterialized_weight_and_missing_engine_name_the_call():
    store = WeightStore(ProcessGroupCollection.single())
    handle = store.declare(WeightSharding.of("w", (3, 2)), InitSpec.constant(1.0))
    x = torch.ones(4, 2)
    for use in (lambda: handle.linear(x), handle.use, handle.get):
        with pytest.raises(ValueError, match=r"w has no storage yet: call materialize\(\)"):
            use()
    store.materialize()
    out = handle.linear(x)
    store.disable_param_grads()
    with pytest.raises(ValueError, match="DataParallel"):
        out.sum().backward()


def test_gradient_sink_opens_once_and_sees_every_accumulation():
    store = build_store()
    accumulated = sink(store).accumulated
    ids, valid, x, grad = inputs(torch.float32, 2)
    network(store, ids, valid, x).backward(grad)
    # Sorted, because the order is the autograd graph's; the second run must repeat it.
    assert sorted(accumulated) == sorted(
        (n, False) for n in ("table", "weight", "bias", "scale", "table")
    )
    previous = copy.copy(accumulated)
    accumulated.clear()
    network(store, ids, valid, x).backward(grad)
    assert accumulated == previous
    assert sink(store).num_allocations == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_dgrad_and_wgrad_match_fp64(dtype: torch.dtype):
    store, bound = build_store(dtype), BOUNDS[dtype]
    weight, bias = store.handles["weight"], store.handles["bias"]
    x, grad = values(2, 7, 6, key=9, dtype=dtype), values(2, 7, 5, key=9, dtype=dtype)
    operands_fp64 = [t.double() for t in (x, weight.get(), bias.get(), grad)]
    with torch.no_grad():
        out = weight.linear(x, bias)
    assert out.dtype is dtype
    assert_close_by_metric("y", out, F.linear(*operands_fp64[:3]), bound=bound)
    assert_close_by_metric(
        "dx", weight.dgrad(grad), operands_fp64[3] @ operands_fp64[1], bound=bound
    )
    product = operands_fp64[3].flatten(0, 1).t() @ operands_fp64[0].flatten(0, 1)
    weight.wgrad(grad, x)  # overwrites
    assert_close_by_metric(
        "dW", weight.main_grad, product, bound=1e-6 if dtype is torch.float32 else bound
    )
    weight.wgrad(grad, x)  # adds
    assert_close_by_metric(
        "2 dW", weight.main_grad, 2 * product, bound=1e-6 if dtype.itemsize > 2 else bound
    )


def test_bf16_weight_gradients_are_summed_in_fp32():
    """A bf16 sum of a large term and many small terms would lose the small terms."""
    store = build_store(torch.bfloat16)
    handle: WeightHandle = store.handles["weight"]
    x = torch.ones(1, 6, dtype=torch.bfloat16)
    for gradient in (256.0, *(0.5,) * 32):
        handle.wgrad(torch.full((1, 5), gradient).bfloat16(), x)
    assert torch.equal(handle.main_grad, torch.full((5, 6), 272.0))
