# SPDX-License-Identifier: Apache-2.0
"""The data-parallel engine: gradients against fp64, overlap, traffic by formula, odd steps."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core.comm import trace
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.initialize import InitSpec
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.weight_gather import WeightStore
from megatron.core.weight_sharding import Box, WeightSharding
from tests.support.activation import assert_active
from tests.support.closeness import assert_all_close, assert_close_by_metric
from tests.support.nan_memory import nan_memory
from tests.support.ranks import run_ranks
from tests.unit_tests.core.distributed.small_model import (
    SHAPES,
    SmallModel,
    bucket_numel,
    reference_gradients,
    tokens,
)


def engine_of(model: SmallModel, strategy: str = "no_shard", *, overlap: bool = True):
    """Return an engine whose gradient buffers hold NaN: what is never written shows."""
    config = DataParallelConfig(strategy=strategy, overlap_grad_reduce=overlap)
    engine = DataParallel(model.store, model.store.groups, config=config)
    poison(engine)
    return engine


def poison(engine: DataParallel) -> None:
    """Fill the slots of all trainable weights with NaN."""
    for handle in engine.store.handles.values():
        if handle.slot is not None:
            handle.slot.fill_(torch.nan)


def train(engine: DataParallel, model: SmallModel, indices, *, spare: bool = True) -> None:
    """Run a step over this lane's microbatches."""
    lane = engine.groups["lanes"].rank
    engine.begin_step()
    for i in indices:
        engine.backward(model.loss(*tokens(lane, i), spare=spare), last=i == indices[-1])
    engine.finish()


def assert_owned_gradients(engine: DataParallel, wanted: dict[str, torch.Tensor]) -> int:
    """Compare what the optimizer would see; return the number of elements."""
    found = 0
    for owned in engine.owned():
        for placed in owned.boxes:
            box, got = placed.box, placed.of(owned.gradients)
            found += box.numel
            difference = (got - cut(wanted[box.name], box)).abs().max()
            assert difference <= 2e-6 * wanted[box.name].abs().max(), box
    return found


def cut(whole: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the part of a logical tensor that a box holds."""
    for dim, (first, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        whole = whole.narrow(dim, first, size)
    return whole


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """Return 1, 2, 3 … in a shape."""
    return torch.arange(1.0, math.prod(shape) + 1).view(shape)


def engine_case(
    groups: ProcessGroupCollection, strategy: str, bucket_bytes: int, overlap: bool
) -> None:
    """Check two steps of one and three microbatches: values, overlap, traffic."""
    lanes = groups["lanes"].size
    model = SmallModel(groups, bucket_bytes=bucket_bytes)
    engine = engine_of(model, strategy, overlap=overlap)
    for indices in ((0,), (1, 2, 3)):
        with nan_memory(), trace(groups) as records:
            train(engine, model, indices)
            engine.gather_weights()
        wanted = reference_gradients(
            model.store, [(lane, i) for lane in range(lanes) for i in indices]
        )
        elements = assert_owned_gradients(engine, wanted)
        launched = len(engine.buckets) if overlap else 0
        assert engine.launched_in_backward == launched
        size = 4 * sum(bucket_numel(b) for b in model.store.buckets)
        if strategy == "no_shard":
            assert elements == sum(w.numel() for w in wanted.values())
            assert_active(records, kind="all_reduce", exactly=len(engine.buckets))
            assert sum(r.bytes for r in records) == size
        else:
            shard = size // 4 // lanes
            assert [o.weights.numel() for o in engine.owned()] == [
                bucket_numel(b) // lanes for b in model.store.buckets
            ]
            assert sum(o.weights.numel() for o in engine.owned()) == shard
            assert_active(
                records,
                kind="reduce_scatter",
                group="lanes",
                exactly=len(engine.buckets),
                exactly_bytes=size,
            )
            assert_active(
                records,
                kind="all_gather",
                group="lanes",
                exactly=len(engine.buckets),
                exactly_bytes=size,
            )
            assert len(records) == 2 * len(engine.buckets)


def engine_cases(rank: int, world: int) -> None:
    """Run every strategy, bucket size and kind of overlap, then the odd steps."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    for strategy in ("no_shard", "optim"):
        for bucket_bytes in (1, 400, 10**9):
            for overlap in (True, False):
                engine_case(groups, strategy, bucket_bytes, overlap)
        _unused(groups, strategy)
        _frozen(groups, strategy)
        _aborted(groups, strategy)
        _gathered(groups, strategy)


def _every(world: int, *indices: int) -> list[tuple[int, int]]:
    return [(lane, i) for lane in range(world) for i in indices]


def _unused(groups: ProcessGroupCollection, strategy: str) -> None:
    """A weight that a step does not use has a gradient of zero, not the last step's."""
    model = SmallModel(groups)
    engine = engine_of(model, strategy)
    train(engine, model, (0,))
    train(engine, model, (1,), spare=False)
    assert engine.launched_in_backward == len(engine.buckets) - 1
    wanted = reference_gradients(model.store, _every(groups["lanes"].size, 1), spare=False)
    assert not wanted["spare"].any()
    assert_owned_gradients(engine, wanted)


def _frozen(groups: ProcessGroupCollection, strategy: str) -> None:
    """Frozen weights are owned by nobody, have no gradient and cost no traffic alone."""
    model = SmallModel(groups)
    model.store.freeze("first", "scale")
    engine = engine_of(model, strategy)
    assert model.store.handles["first"].slot is None
    with trace(groups) as records:
        train(engine, model, (4,))
        engine.gather_weights()
    wanted = reference_gradients(model.store, _every(groups["lanes"].size, 4))
    names = {placed.box.name for owned in engine.owned() for placed in owned.boxes}
    assert not names & {"first", "scale"}
    assert_owned_gradients(engine, wanted)
    each = 1 if strategy == "no_shard" else 2
    assert len(records) == each * (len(engine.buckets) - 2)
    assert engine.launched_in_backward == len(engine.buckets) - 2


def _aborted(groups: ProcessGroupCollection, strategy: str) -> None:
    """A step that fails half-way, its last microbatch begun, leaves nothing behind."""
    model = SmallModel(groups)
    engine = engine_of(model, strategy)
    lane = groups["lanes"].rank
    engine.begin_step()
    engine.backward(model.loss(*tokens(lane, 0)), last=False)
    engine.backward(model.loss(*tokens(lane, 1)), last=True)
    engine.abort()
    with pytest.raises(ValueError, match=r"backward outside a step: call begin_step\(\) first"):
        engine.backward(model.loss(*tokens(lane, 0)), last=True)
    with pytest.raises(ValueError, match=r"finish outside a step: call begin_step\(\) first"):
        engine.finish()
    poison(engine)
    train(engine, model, (2,))
    assert_owned_gradients(
        engine, reference_gradients(model.store, _every(groups["lanes"].size, 2))
    )


def _gathered(groups: ProcessGroupCollection, strategy: str) -> None:
    """What each rank writes into its own range is on all ranks after gather_weights()."""
    model = SmallModel(groups, bucket_bytes=400)
    engine = engine_of(model, strategy)
    for bucket in model.store.buckets:
        bucket.weights.data.fill_(torch.nan)
    for owned in engine.owned():
        for placed in owned.boxes:
            placed.of(owned.weights).copy_(cut(numbered(placed.box.shape), placed.box))
    engine.gather_weights()
    for name, handle in model.store.handles.items():
        assert torch.equal(handle.get(), numbered(SHAPES[name]))


def test_gradients_overlap_and_traffic_on_two_lanes():
    run_ranks(engine_cases, 2)


def two_axes(rank: int, world: int) -> None:
    """Check a partial(tp) gradient: summed over lanes and over tp, once each."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=2), rank=rank)
    for strategy in ("no_shard", "optim"):
        store = WeightStore(groups)
        norm = WeightSharding.of("norm", (70,), gradient={"tp": "partial"})
        whole = WeightSharding.of("bias", (5,), gradient={"tp": "identical"})
        norm_handle = store.declare(norm, InitSpec.constant(1.0))
        bias_handle = store.declare(whole, InitSpec.constant(1.0))
        store.materialize()
        engine = DataParallel(store, groups, config=DataParallelConfig(strategy=strategy))
        lane, tp = groups["lanes"].rank, groups["tp"].rank
        for _ in range(2):
            engine.begin_step()
            norm_handle.slot.fill_(torch.nan)
            loss = norm_handle.use().sum() * (1.0 + 10.0 * lane + 100.0 * tp)
            engine.backward(loss + bias_handle.use().sum() * (1.0 + 10.0 * lane), last=True)
            with trace(groups) as records:
                engine.finish()
            boxes = [(p, p.of(o.gradients)) for o in engine.owned() for p in o.boxes]
            for placed, gradient in boxes:
                value = 224.0 if placed.box.name == "norm" else 12.0
                assert (gradient == value).all(), placed.box.name
            summed = sum(g.nbytes for placed, g in boxes if placed.box.name == "norm")
            assert_active(records, group="tp", exactly=1, exactly_bytes=summed)


def test_what_the_plan_sums_over_tp_is_summed_once():
    run_ranks(two_axes, 4)


def tied_stages(rank: int, world: int) -> int:
    """Sum a tied weight's gradient over its two stages; return the elements counted here."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, pp=2), rank=rank)
    store = WeightStore(groups)
    tied = WeightSharding.of("table", (5, 3), stages=(0, 1))
    handle = store.declare(tied, InitSpec.constant(1.0))
    store.materialize()
    engine = DataParallel(store, groups)
    engine.begin_step()
    engine.backward(handle.use().sum() * (1.0 + 10.0 * rank), last=True)
    engine.finish()
    assert (handle.slot == 12.0).all()
    (owned,) = engine.owned()
    assert [placed.replica_ranks for placed in owned.boxes] == [(0, 1)]
    return sum(stop - start for start, stop in owned.counted)


def test_a_weight_of_two_stages_is_summed_over_them_and_counted_once():
    assert run_ranks(tied_stages, 2) == [15, 0]


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_one_process_sends_nothing_and_equals_autograd(strategy: str):
    groups = ProcessGroupCollection.single()
    model = SmallModel(groups, bucket_bytes=400)
    engine = engine_of(model, strategy)
    with nan_memory(), trace(groups) as records:
        train(engine, model, (0, 1, 2))
        engine.gather_weights()
    assert records == []
    wanted = reference_gradients(model.store, [(0, 0), (0, 1), (0, 2)])
    assert_all_close({n: h.slot for n, h in model.store.handles.items()}, wanted, bound=2e-6)
    assert assert_owned_gradients(engine, wanted) == sum(w.numel() for w in wanted.values())


def test_split_backward_reduces_buckets_while_the_queue_is_drained():
    model = SmallModel(ProcessGroupCollection.single())
    engine = engine_of(model)
    engine.begin_step()
    engine.accumulate(last=True)
    with model.store.defer() as queue:
        model.loss(*tokens(0, 0)).backward()
    assert engine.launched_in_backward == 0
    queue.drain()
    assert engine.launched_in_backward == len(engine.buckets)
    engine.finish()
    wanted = reference_gradients(model.store, [(0, 0)])
    assert_owned_gradients(engine, wanted)


def test_padding_of_gradients_and_weights_stays_zero():
    model = SmallModel(ProcessGroupCollection.single(), bucket_bytes=10**9)
    engine = engine_of(model)
    train(engine, model, (0,))
    (entry,) = engine.buckets
    inside = torch.zeros(entry.bucket.layout.numel, dtype=torch.bool)
    for member in entry.bucket.layout.members:
        inside[member.start : member.stop] = True
    assert (~inside).any()
    assert not entry.gradients.data[~inside].any()
    assert not entry.bucket.weights.data[~inside].any()


def test_more_uses_than_declared_are_refused():
    model = SmallModel(ProcessGroupCollection.single())
    engine = engine_of(model)
    engine.begin_step()
    loss = model.loss(*tokens(0, 0)) + model.store.handles["scale"].use().sum()
    with pytest.raises(ValueError, match="scale got more gradients than its 1 declared uses"):
        engine.backward(loss, last=True)


def test_what_cannot_be_built_says_why():
    with pytest.raises(ValueError, match="strategy 'zero9': use one of no_shard, optim"):
        DataParallelConfig(strategy="zero9")
    groups = ProcessGroupCollection.single()
    with pytest.raises(ValueError, match="materialize the weight store before"):
        DataParallel(WeightStore(groups), groups)


def test_gradients_accumulate_in_fp32_for_bf16_weights():
    model = SmallModel(ProcessGroupCollection.single(), dtype=torch.bfloat16)
    engine = engine_of(model)
    train(engine, model, (0, 1))
    wanted = reference_gradients(model.store, [(0, 0), (0, 1)])
    for name, handle in model.store.handles.items():
        assert handle.slot.dtype is torch.float32
        assert_close_by_metric(name, handle.slot, wanted[name], bound=2e-2)
