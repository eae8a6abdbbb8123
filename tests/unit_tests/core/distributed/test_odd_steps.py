# SPDX-License-Identifier: Apache-2.0
"""Unusual steps: frozen or unused weights, evaluations, failures, reordering, deferred wgrads.

Every case runs for all strategies on two ranks with unused buffers full of NaN, and again with
prefetched gathers and late collectives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.comm import trace
from megatron.core.weight_sharding import STRATEGIES
from tests.support.closeness import relative_error
from tests.support.ranks import run_ranks
from tests.support.simulated_links import Late, simulated
from tests.unit_tests.core.distributed.engine_steps import (
    Reference,
    assert_gradients,
    assert_weights,
    build_engine,
    slice_box,
    train,
    train_and_compare,
    update,
)
from tests.unit_tests.core.distributed.small_model import SHAPES, plain_loss, tokens

Groups = ProcessGroupCollection
Config = dict[str, object]


def unused_weight(groups: Groups, config: Config) -> None:
    """A weight that a step does not use gets a zero gradient, not the previous step's."""
    model, engine = build_engine(groups, **config)
    reference = Reference(groups["dense_dp"].size)
    train_and_compare(model, engine, reference, ((0,), (1,)))
    train(model, engine, (2, 3), spare=False)
    expected = reference.gradients((2, 3), spare=False)
    assert not expected["spare"].any()
    assert_gradients(engine, expected, zeros=("spare",))
    assert engine.launched_in_backward == sum(len(b.blocks) for b in engine.buckets) - 1
    update(engine)
    engine.start_param_sync()
    reference.update(expected)
    train_and_compare(model, engine, reference, ((4,), (5,)))


def frozen_weights(groups: Groups, config: Config) -> None:
    """Frozen weights have no owner, keep their values and cause no traffic in separate buckets."""
    for names in (("first", "first.bias", "scale"), ("table",), ("first",)):
        model, engine = build_engine(groups, freeze=names, **config)
        reference = Reference(groups["dense_dp"].size, frozen=names)
        before = {n: reference.weights[n].clone() for n in names}
        with trace(groups) as records:
            train_and_compare(model, engine, reference, ((0,), (1, 2), (3, 4), (5,)))
        assert_weights(engine, reference.weights)
        assert all(torch.equal(reference.weights[n], before[n]) for n in names)
        owned = {box.name for o in engine.owned() for box in o.boxes}
        assert owned or groups["dp_cp"].size > 1, "another replica may own all trained weights"
        assert not owned & set(names)
        assert all(model.store.handles[n].main_grad is None for n in names)
        trained = {entry.bucket.index for entry in engine.buckets}
        frozen_bucket = model.store.handles[names[0]].block.bucket
        all_frozen = all(handle.name in names for handle in frozen_bucket.handles)
        assert (frozen_bucket.index in trained) != all_frozen
        reduced = [r for r in records if r.kind in ("all_reduce", "reduce_scatter")]
        # Sharded gradients are reduced in every microbatch, with gtp only some of them.
        assert len(reduced) % len(trained) == 0 or any(b.bucket.gtp for b in engine.buckets)
        if engine.gatherers and not frozen_bucket.sharded and all_frozen:
            assert frozen_bucket.blocks[0].ready, "a weight without updates is never gathered again"


def evaluations(groups: Groups, config: Config) -> None:
    """Evaluations between steps change nothing, even while gathers are in flight."""
    model, engine = build_engine(groups, **config)
    reference = Reference(groups["dense_dp"].size)
    dp_rank = groups["dense_dp"].rank

    def evaluate() -> None:
        with engine.evaluation(), torch.no_grad():
            for index in (20, 21):
                ids, targets = tokens(dp_rank, index)
                logits = reference_loss(reference, ids, targets)
                assert relative_error(model.loss(ids, targets), logits) <= 1e-6
        assert all(gatherer.pool.live_bytes == 0 for gatherer in engine.gatherers)

    def fail() -> None:
        with contextlib.suppress(Stop), engine.evaluation(), torch.no_grad():
            model.store.handles["table"].embedding(tokens(dp_rank, 20)[0])
            raise Stop
        assert all(gatherer.pool.live_bytes == 0 for gatherer in engine.gatherers)

    fail()
    evaluate()
    for indices in ((0,), (1, 2), (3,), (4, 5)):
        train(model, engine, indices)
        expected = reference.gradients(indices)
        assert_gradients(engine, expected)
        if indices[0] == 3:
            evaluate()  # before the optimizer
        update(engine)
        engine.start_param_sync(force_sync=indices[0] == 1)
        reference.update(expected)
        evaluate()
        fail()
        evaluate()
    assert all(gatherer.counts.mismatches == 0 for gatherer in engine.gatherers)
    engine.begin_step()
    with pytest.raises(ValueError, match="inside a step: call finish"), engine.evaluation():
        pass
    engine.abort()


def reference_loss(reference: Reference, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the reference's loss of one microbatch."""
    return plain_loss(reference.weights, ids, targets)


class Stop(Exception):
    """The failure of a step."""


class _Fails(torch.autograd.Function):
    """The identity, whose backward fails."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise Stop


def failed_steps(groups: Groups, config: Config) -> None:
    """A step that fails in forward or backward leaves no state."""
    model, engine = build_engine(groups, **config)
    reference = Reference(groups["dense_dp"].size)
    dp_rank, use = groups["dense_dp"].rank, model.store.handles

    def in_forward() -> None:
        use["first"].linear(use["table"].embedding(tokens(dp_rank, 9)[0]), use["first.bias"])
        raise Stop

    def in_backward() -> None:
        ids, targets = tokens(dp_rank, 9)
        hidden = _Fails.apply(use["first"].linear(use["table"].embedding(ids), use["first.bias"]))
        logits = use["table"].linear(use["third"].linear(torch.tanh(hidden) * use["scale"].use()))
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        engine.backward(loss, last=True)

    for first_index, fail in ((0, in_forward), (3, in_backward), (6, in_forward), (9, in_backward)):
        engine.begin_step(2)
        engine.backward(model.loss(*tokens(dp_rank, first_index)), last=False)
        with pytest.raises(Stop):
            fail()
        engine.abort()
        assert engine.pool.live_bytes == 0
        assert all(gatherer.pool.live_bytes == 0 for gatherer in engine.gatherers)
        with pytest.raises(ValueError, match=r"begin_step\(\)"):
            engine.backward(torch.zeros(()), last=True)
        with pytest.raises(ValueError, match=r"begin_step\(\)"):
            engine.finish()
        train_and_compare(model, engine, reference, ((first_index + 1, first_index + 2),))
    assert_weights(engine, reference.weights)


def parameter_sync(groups: Groups, config: Config) -> None:
    """After a parameter sync all ranks have what each rank wrote into its owned ranges."""
    model, engine = build_engine(groups, bucket_bytes=400, **config)
    for bucket in model.store.buckets:
        bucket.data.fill_(torch.nan)
    values_by_name = {}
    for owned in engine.owned():
        for box in owned.boxes:
            shape = box.shape
            numbers = torch.arange(1.0, torch.Size(shape).numel() + 1).view(shape)
            values_by_name[box.name] = numbers
            box.of(owned.weights).copy_(slice_box(numbers, box.box))
    engine.start_param_sync(force_sync=True)
    with engine.evaluation():
        for name, handle in model.store.handles.items():
            numbers = torch.arange(1.0, handle.get().numel() + 1).view(SHAPES[name])
            assert torch.equal(handle.get(), numbers)
    assert values_by_name


def reordered_layers(groups: Groups, config: Config) -> None:
    """A step with reordered layers counts a mismatch, gathers on demand and stays exact."""
    model, engine = build_engine(groups, **config)
    reference = Reference(groups["dense_dp"].size)
    train_and_compare(model, engine, reference, ((0, 1), (2, 3), (4, 5)))
    before = [gatherer.counts.mismatches for gatherer in engine.gatherers]
    dp_rank, use = groups["dense_dp"].rank, model.store.handles
    engine.begin_step(2)
    for index in (6, 7):
        spare = torch.sin(use["spare"].use()).sum(0)
        scale = use["scale"].use()  # the scale is used before the first layer
        ids, targets = tokens(dp_rank, index)
        hidden = use["first"].linear(use["table"].embedding(ids), use["first.bias"])
        hidden = torch.tanh(hidden) * scale + spare
        hidden = torch.tanh(use["second"].linear(hidden, use["second.bias"]))
        logits = use["table"].linear(hidden + use["third"].linear(hidden))
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        engine.backward(loss, last=index == 7)
    engine.finish()
    expected = reference.gradients((6, 7))
    assert_gradients(engine, expected)
    update(engine)
    engine.start_param_sync()
    reference.update(expected)
    planned = [gatherer.reshards or gatherer.prefetch for gatherer in engine.gatherers]
    mismatches = [gatherer.counts.mismatches for gatherer in engine.gatherers]
    assert mismatches == [count + has_plan for count, has_plan in zip(before, planned, strict=True)]
    train_and_compare(model, engine, reference, ((8, 9), (10, 11), (12,)))
    for gatherer, mismatches_before, has_plan in zip(
        engine.gatherers, before, planned, strict=True
    ):
        if has_plan:
            assert gatherer.counts.mismatches <= mismatches_before + 2
            assert gatherer.current_plan is not None
            assert gatherer.counts.peak_bytes <= gatherer.budget


def two_models(groups: Groups, config: Config) -> None:
    """Interleaved steps of two engines in one process do not affect each other."""
    dp_rank = groups["dense_dp"].rank
    pairs = [build_engine(groups, **config) for _ in range(2)]
    references = [Reference(groups["dense_dp"].size) for _ in range(2)]
    for step in range(3):
        for _, engine in pairs:
            engine.begin_step(2)
        for is_last in (False, True):
            for number, (model, engine) in enumerate(pairs):
                index = 10 * number + 2 * step + is_last
                engine.backward(model.loss(*tokens(dp_rank, index)), last=is_last)
        for number, (_, engine) in enumerate(pairs):
            engine.finish()
            expected = references[number].gradients(
                [10 * number + 2 * step, 10 * number + 2 * step + 1]
            )
            assert_gradients(engine, expected)
            update(engine)
            references[number].update(expected)
        for _, engine in pairs:
            engine.start_param_sync()


def deferred_wgrads(groups: Groups, config: Config) -> None:
    """Weight gradients deferred by a microbatch are bit-equal to the immediate ones."""
    dp_rank = groups["dense_dp"].rank
    immediate, deferred = build_engine(groups, **config), build_engine(groups, **config)
    for indices in ((0, 1, 2), (3, 4, 5), (6,)):
        train(*immediate, indices)
        model, engine = deferred
        engine.begin_step(len(indices))
        pending_queue = None
        for i in indices:
            loss = model.loss(*tokens(dp_rank, i))
            with model.store.defer() as queue:
                engine.backward(loss, last=False)
            assert len(queue) == 9, "table twice, two biased layers, scale, spare, third"
            if pending_queue is not None:
                pending_queue.drain()
            pending_queue = queue
        assert engine.launched_in_backward == 0
        engine.set_is_last_backward(True)
        pending_queue.drain()
        assert engine.launched_in_backward == immediate[1].launched_in_backward > 0
        engine.finish()
        for immediate_range, deferred_range in zip(
            immediate[1].owned(), engine.owned(), strict=True
        ):
            assert torch.equal(immediate_range.gradients, deferred_range.gradients)
        for trained_engine in (immediate[1], engine):
            update(trained_engine)
            trained_engine.start_param_sync()


def too_many_uses(groups: Groups, config: Config) -> None:
    """An undeclared extra use of a weight is refused once its reduction has begun, else summed."""
    model, engine = build_engine(groups, **config)
    dp_rank = groups["dense_dp"].rank
    engine.begin_step()
    loss = model.loss(*tokens(dp_rank, 0)) + model.store.handles["scale"].use().sum()
    if engine.placement.gradient:
        engine.backward(loss, last=True)
        engine.finish()
        expected = Reference(groups["dense_dp"].size).gradients((0,))
        expected["scale"] += groups["dense_dp"].size
        assert_gradients(engine, expected)
    else:
        with pytest.raises(ValueError, match="scale got a gradient after the reduction"):
            engine.backward(loss, last=True)
        engine.abort()


def bf16_gradients(groups: Groups, config: Config) -> None:
    """bf16 gradients are reduced in bf16, or summed in fp32."""
    num_ranks = groups["dense_dp"].size
    for fp32_accumulation in (False, True) if config["strategy"] != "no_shard" else (False,):
        model, engine = build_engine(
            groups,
            grad_dtype=torch.bfloat16,
            fp32_accumulation=fp32_accumulation,
            bucket_bytes=400,
            **config,
        )
        reference = Reference(num_ranks)
        for indices in ((0,), (1, 2, 3), (4, 5)):
            with trace(groups) as records:
                train(model, engine, indices)
            # every accumulation and every sum rounds to 8 bits: 2^-9 each
            assert_gradients(engine, reference.gradients(indices), bound=len(indices) * 2**-7)
            kinds = {r.kind for r in records if r.dtype == "bfloat16"}
            sums = "all_to_all" if fp32_accumulation else "reduce_scatter"
            has_gtp = any(entry.bucket.gtp for entry in engine.buckets)
            expected_kinds = {sums} if engine.sharded else {"all_reduce"}
            assert kinds == (
                expected_kinds | {"reduce_scatter"}
                if has_gtp and not fp32_accumulation
                else expected_kinds
            )
        expected_dtype = (
            torch.float32 if fp32_accumulation or engine.placement.gradient else torch.bfloat16
        )
        for entry in engine.buckets:  # gradient shards kept over microbatches are fp32
            assert entry.gradients.dtype is (
                torch.float32 if entry.every_microbatch else expected_dtype
            )


def bf16_weights(groups: Groups, config: Config) -> None:
    """bf16 weights are stored and gathered in bf16; their gradients are summed in fp32."""
    model, engine = build_engine(groups, dtype=torch.bfloat16, bucket_bytes=400, **config)
    reference = Reference(groups["dense_dp"].size)
    rounded = {n: w.bfloat16().double() for n, w in reference.weights.items()}
    reference.weights = rounded
    for indices in ((0,), (1, 2), (3, 4)):
        with trace(groups) as records:
            engine.start_param_sync()
            train(model, engine, indices)
        # activations round to 8 bits at every product
        assert_gradients(engine, reference.gradients(indices), bound=4e-2)
        gathered_dtypes = {r.dtype for r in records if r.kind == "all_gather"} - {"int64"}
        assert gathered_dtypes == ({"bfloat16"} if engine.gatherers else set())
        reduced_dtypes = {r.dtype for r in records if r.kind in ("all_reduce", "reduce_scatter")}
        assert reduced_dtypes == {"float32"}
    assert {o.gradients.dtype for o in engine.owned()} == {torch.float32}


CASES: tuple[Callable[[Groups, Config], None], ...] = (
    unused_weight, frozen_weights, evaluations, failed_steps, parameter_sync, reordered_layers,
    two_models, deferred_wgrads, too_many_uses, bf16_gradients, bf16_weights,
)  # fmt: skip


def run_on_dp_ranks(rank: int, world: int, case: Callable[[Groups, Config], None]) -> None:
    """Run a case for every strategy over data-parallel ranks."""
    run_case(ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank), case)


def run_on_gtp_ranks(rank: int, world: int, case: Callable[[Groups, Config], None]) -> None:
    """Run a case with matrices sharded over two gtp ranks."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, gtp=2), rank=rank)
    for strategy in STRATEGIES[:3]:
        model, engine = build_engine(groups, strategy=strategy)
        assert {b.gtp for b in model.store.buckets} == {True, False}
        assert len(engine.gatherers) == 1 + engine.sharded
    run_case(groups, case)


def run_case(groups: Groups, case: Callable[[Groups, Config], None]) -> None:
    """Run a case for every strategy, first plainly, then with prefetch and late collectives."""
    for strategy in STRATEGIES:
        case(groups, {"strategy": strategy})
        config: Config = {"strategy": strategy, "overlap_param_gather": strategy != "no_shard"}
        if case is too_many_uses:
            case(groups, config)  # it writes into a buffer in flight, which `simulated` forbids
            continue
        with simulated(groups, Late()) as link:
            case(groups, config)
        assert link.count > 0 or (case is parameter_sync and strategy == "no_shard")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_unusual_steps_match_reference_on_two_dp_ranks(case: Callable[[Groups, Config], None]):
    run_ranks(run_on_dp_ranks, 2, case)


def run_on_gtp_replicas(rank: int, world: int, case: Callable[[Groups, Config], None]) -> None:
    """Run a case where gtp-sharded weights share buckets and two replicas hold each shard."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, gtp=2), rank=rank)
    for strategy in STRATEGIES[:3]:
        for reduce_per in ("microbatch", "step") if strategy in STRATEGIES[:2] else ("microbatch",):
            config: Config = {"strategy": strategy, "bucket_bytes": 150}
            config["gtp_reduce_scatter_per"] = reduce_per
            model, _ = build_engine(groups, **config)
            block_counts = [len(bucket.blocks) for bucket in model.store.buckets if bucket.gtp]
            assert len(block_counts) > 1
            assert max(block_counts) > 1
            with simulated(groups, Late()):
                case(groups, config)


@pytest.mark.parametrize(
    "case",
    [
        unused_weight,
        frozen_weights,
        reordered_layers,
        # The faster tests on two ranks cover these four cases, too.
        *(
            pytest.param(case, marks=pytest.mark.slow(seconds=4))
            for case in (evaluations, failed_steps, two_models, deferred_wgrads)
        ),
    ],
    ids=lambda case: case.__name__,
)
def test_unusual_steps_match_reference_with_gtp_replicas(case: Callable[[Groups, Config], None]):
    run_ranks(run_on_gtp_replicas, 4, case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_unusual_steps_match_reference_on_two_gtp_ranks(case: Callable[[Groups, Config], None]):
    run_ranks(run_on_gtp_ranks, 2, case)


def use_weights_in_different_order(rank: int, world: int) -> None:
    """Use two buckets of equal size in a different order on each rank, which exchanges weights."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    for debug in (True, False):
        model, engine = build_engine(groups, strategy="optim_grads_params", debug=debug)
        names = ("scale", "third")
        use = model.store.handles
        sizes = {use[name].block.unsharded_bytes for name in names}
        assert len(sizes) == 1, "else the gathers themselves would fail"
        engine.begin_step()
        for name in names[:: 1 - 2 * rank]:
            use[name].get()
        if debug:
            with pytest.raises(ValueError, match="needed them in different orders in this step"):
                engine.finish()
        else:
            with trace(groups) as records:
                engine.finish()
            assert {r.kind for r in records} == {"reduce_scatter"}, "the order is not compared"


def test_debug_mode_reports_ranks_using_weights_in_other_order():
    run_ranks(use_weights_in_different_order, 2)
