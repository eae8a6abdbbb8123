# SPDX-License-Identifier: Apache-2.0
"""Computing through weight handles against autograd in fp64; gradients in slots, split or not."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from megatron.core.initialize import InitSpec
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.weight_gather import WeightHandle, WeightStore
from megatron.core.weight_sharding import WeightSharding
from tests.support.closeness import assert_close_by_metric
from tests.support.inputs import generator
from tests.support.nan_memory import nan_memory

#: Operands are rounded to bf16 (2^-9) before and results after each product, then summed in fp32.
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 1.5e-2}
SHAPES = {"table": (11, 6), "weight": (5, 6), "bias": (5,), "scale": (6,)}


class Slots:
    """A sink of gradients that keeps one slot a weight, all step long, and notes every put."""

    def __init__(self, store: WeightStore) -> None:
        self.store = store
        self.told: list[tuple[str, bool]] = []
        self.opened = 0
        for handle in store.handles.values():
            handle.gradients = self

    def alloc_main_grads(self) -> None:
        """Fill the slots with NaN: what is not written first shows."""
        self.opened += 1
        for handle in self.store.handles.values():
            if handle.trainable:
                handle.main_grad = torch.full(handle.shape, torch.nan)

    def grad_accumulated(self, handle: WeightHandle) -> None:
        """Note the put."""
        self.told.append((handle.name, handle.overwrite_main_grad))


def built(dtype: torch.dtype = torch.float32, *, slots: bool = True) -> WeightStore:
    """Return a store of four weights."""
    store = WeightStore(ProcessGroupCollection.single(), seed=4, dtype=dtype)
    for name, shape in SHAPES.items():
        store.declare(WeightSharding.of(name, shape), InitSpec.normal(0.7))
    store.materialize()
    if slots:
        Slots(store)
    return store


def sink(store: WeightStore) -> Slots:
    """Return who collects a store's gradients."""
    found = store.handles["table"].gradients
    assert isinstance(found, Slots)
    return found


def values(*shape: int, key: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normal values."""
    return torch.randn(shape, generator=generator(6, key, *shape)).to(dtype)


def reference_weights(store: WeightStore) -> dict[str, torch.Tensor]:
    """Return fp64 leaves of the same values."""
    return {n: h.get().double().requires_grad_(True) for n, h in store.handles.items()}


def network(store: WeightStore, ids: torch.Tensor, valid: torch.Tensor, x: torch.Tensor):
    """Use every entry point, the table twice: [4, 3, 11]."""
    use = store.handles
    rows = use["table"].embedding(ids, valid) + x
    hidden = rows * use["scale"].use(torch.float32).to(x.dtype)
    inner = use["weight"].linear(hidden, use["bias"])
    return use["table"].linear(F.pad(torch.tanh(inner), (0, 1), value=0.5))


def plain_network(weights, ids, valid, x):
    """The same with autograd alone."""
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
    store, bound = built(dtype), BOUNDS[dtype]
    weights = reference_weights(store)
    with nan_memory():
        for key in (1, 2):  # the first put of each slot overwrites, all later ones add
            ids, valid, x, grad = inputs(dtype, key)
            x.requires_grad_(True)
            out = network(store, ids, valid, x)
            out.backward(grad)
            wide = x.detach().double().requires_grad_(True)
            reference = plain_network(weights, ids, valid.double(), wide)
            reference.backward(grad.double())
            assert out.dtype is dtype
            assert_close_by_metric("output", out, reference, bound=bound)
            assert_close_by_metric("input gradient", x.grad, wide.grad, bound=bound)
    for name, handle in store.handles.items():
        assert not handle.overwrite_main_grad
        assert handle.anchor.grad is None
        assert handle.main_grad.dtype is torch.float32
        assert_close_by_metric(name, handle.main_grad, weights[name].grad, bound=bound)


@pytest.mark.parametrize("name", ["table", "weight", "bias", "scale"])
def test_first_put_of_a_step_overwrites_and_later_ones_add(name: str):
    store = built()

    def put() -> torch.Tensor:
        ids, valid, x, grad = inputs(torch.float32, 5)
        network(store, ids, valid, x).backward(grad)
        return store.handles[name].main_grad.clone()

    once = put()
    assert_close_by_metric("twice", put(), 2 * once, bound=1e-6)
    for handle in store.handles.values():
        handle.overwrite_main_grad = True
    assert torch.equal(put(), once)


def test_an_embedding_that_comes_first_writes_every_row():
    handle = built().handles["table"]
    ids, grad = torch.tensor([3, 7, 3]), (8 * values(3, 6)).round()  # sums are exact
    wanted = torch.zeros(11, 6).index_add_(0, ids, grad)
    for factor in (1.0, 2.0):
        (handle.embedding(ids) * grad).sum().backward()
        assert torch.equal(handle.main_grad, factor * wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_split_backward_is_bitwise_the_unsplit_one(dtype: torch.dtype):
    whole, split = built(dtype), built(dtype)
    for key in (1, 2):
        ids, valid, x, grad = inputs(dtype, key)
        a, b = x.clone().requires_grad_(True), x.clone().requires_grad_(True)
        network(whole, ids, valid, a).backward(grad)
        loss = network(split, ids, valid, b)
        with split.defer() as queue:
            loss.backward(grad)
        assert len(queue) == 5, "table twice, weight, bias, scale"
        assert torch.equal(a.grad, b.grad)
        if key == 1:
            assert sink(split).opened == 0, "put at once"
        queue.drain()
        assert len(queue) == 0
    for name, handle in whole.handles.items():
        assert torch.equal(handle.main_grad, split.handles[name].main_grad), name


def test_outside_of_defer_puts_run_at_once_again():
    store = built()
    with pytest.raises(KeyError), store.defer():
        raise KeyError
    assert not any(handle.defers for handle in store.handles.values())


class _Holds(torch.autograd.Function):
    """The identity, whose node keeps an object alive."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.kept = kept
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Watched:
    """Something that a weak reference can watch."""


def test_waiting_gradients_keep_no_graph_alive():
    store = built()
    ids, valid, x, grad = inputs(torch.float32, 3)
    kept = _Watched()
    watched = weakref.ref(kept)
    out = network(store, ids, valid, _Holds.apply(x.requires_grad_(True), kept))
    with store.defer() as queue:
        out.backward(grad)
    del kept, out, x
    gc.collect()
    assert len(queue) == 5
    assert watched() is None
    queue.drain()


def test_slots_do_not_alias_the_gradients_that_were_put():
    store = built()
    handle, given = store.handles["scale"], values(6)
    copy_of = handle.use()
    copy_of.backward(given)
    handle.main_grad.zero_()
    assert given.abs().sum() > 0
    before = handle.get().clone()
    with torch.no_grad():
        copy_of.zero_()
    assert torch.equal(handle.get(), before), "use() must give a private copy"


def test_read_only_weight_is_no_copy_and_takes_a_gradient():
    handle, given = built().handles["scale"], values(6)
    weight = handle.read_only()
    assert weight.data_ptr() == handle.unsharded_param.data_ptr()
    assert handle.unsharded_param.grad_fn is None, "a weight that is stored has no history"
    weight.backward(given)
    assert torch.equal(handle.main_grad, given)
    wide = handle.read_only(torch.float64)
    assert torch.equal(wide.detach(), handle.get().double())
    with torch.no_grad():
        assert handle.read_only() is handle.unsharded_param


@pytest.mark.parametrize("frozen", ["table", "weight", "bias", "scale"])
def test_frozen_weights_pass_gradients_on_and_get_none(frozen: str):
    store, reference = built(), built()
    handle = store.handles[frozen]
    handle.anchor.requires_grad_(False)
    handle.gradients = None
    ids, valid, x, grad = inputs(torch.float32, 7)
    a, b = x.clone().requires_grad_(True), x.clone().requires_grad_(True)
    network(store, ids, valid, a).backward(grad)
    network(reference, ids, valid, b).backward(grad)
    assert torch.equal(a.grad, b.grad)
    assert handle.main_grad is None
    for name, other in store.handles.items():
        if name != frozen:
            assert torch.equal(other.main_grad, reference.handles[name].main_grad)


def test_frozen_model_builds_no_graph_and_saves_nothing():
    store = built(slots=False)
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
    with pytest.raises(ValueError, match="w has no gradient buffer: build a DataParallel engine"):
        out.sum().backward()


def test_gradient_sink_opens_once_and_sees_every_accumulation():
    store = built()
    told = sink(store).told
    ids, valid, x, grad = inputs(torch.float32, 2)
    network(store, ids, valid, x).backward(grad)
    # The order of the graph, which is the same in every run.
    assert sorted(told) == sorted((n, False) for n in ("table", "weight", "bias", "scale", "table"))
    again = copy.copy(told)
    told.clear()
    network(store, ids, valid, x).backward(grad)
    assert told == again
    assert sink(store).opened == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrix_products(dtype: torch.dtype):
    store, bound = built(dtype), BOUNDS[dtype]
    weight, bias = store.handles["weight"], store.handles["bias"]
    x, grad = values(2, 7, 6, key=9, dtype=dtype), values(2, 7, 5, key=9, dtype=dtype)
    wide = [t.double() for t in (x, weight.get(), bias.get(), grad)]
    with torch.no_grad():
        out = weight.linear(x, bias)
    assert out.dtype is dtype
    assert_close_by_metric("y", out, F.linear(*wide[:3]), bound=bound)
    assert_close_by_metric("dx", weight.dgrad(grad), wide[3] @ wide[1], bound=bound)
    product = wide[3].flatten(0, 1).t() @ wide[0].flatten(0, 1)
    weight.wgrad(grad, x)  # overwrites
    assert_close_by_metric(
        "dW", weight.main_grad, product, bound=1e-6 if dtype is torch.float32 else bound
    )
    weight.wgrad(grad, x)  # adds
    assert_close_by_metric(
        "2 dW", weight.main_grad, 2 * product, bound=1e-6 if dtype.itemsize > 2 else bound
    )


def test_weight_gradients_of_bf16_are_summed_in_fp32():
    """One large and many small terms: a bf16 sum would lose the small ones."""
    store = built(torch.bfloat16)
    handle: WeightHandle = store.handles["weight"]
    x = torch.ones(1, 6, dtype=torch.bfloat16)
    for gradient in (256.0, *(0.5,) * 32):
        handle.wgrad(torch.full((1, 5), gradient).bfloat16(), x)
    assert torch.equal(handle.main_grad, torch.full((5, 6), 272.0))
