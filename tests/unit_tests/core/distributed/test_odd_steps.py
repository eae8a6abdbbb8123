# SPDX-License-Identifier: Apache-2.0
"""Steps that are not like the others: frozen, unused, evaluated, failed, changed, split.

Every case runs for all strategies on two lanes with unused buffers full of NaN, and again with
gathers ahead and collectives as late as may be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch

from megatron.core.comm import trace
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.weight_sharding import STRATEGIES
from tests.support.closeness import relative_error
from tests.support.ranks import run_ranks
from tests.support.simulated_links import Late, simulated
from tests.unit_tests.core.distributed.engine_steps import (
    Reference,
    assert_gradients,
    assert_weights,
    built,
    cut,
    steps_against,
    train,
    update,
)
from tests.unit_tests.core.distributed.small_model import SHAPES, plain_loss, tokens

Groups = ProcessGroupCollection
Config = dict[str, object]


def unused(groups: Groups, config: Config) -> None:
    """A weight that a step does not use has a gradient of zero, not the last step's."""
    model, engine = built(groups, **config)
    reference = Reference(groups["dense_dp"].size)
    steps_against(model, engine, reference, ((0,), (1,)))
    train(model, engine, (2, 3), spare=False)
    wanted = reference.gradients((2, 3), spare=False)
    assert not wanted["spare"].any()
    assert_gradients(engine, wanted, zeros=("spare",))
    assert engine.launched_in_backward == sum(len(b.blocks) for b in engine.buckets) - 1
    update(engine)
    engine.start_param_sync()
    reference.update(wanted)
    steps_against(model, engine, reference, ((4,), (5,)))


def frozen(groups: Groups, config: Config) -> None:
    """Frozen weights are owned by nobody, keep their values, and cost nothing alone."""
    for names in (("first", "first.bias", "scale"), ("table",), ("first",)):
        model, engine = built(groups, freeze=names, **config)
        reference = Reference(groups["dense_dp"].size, frozen=names)
        before = {n: reference.weights[n].clone() for n in names}
        with trace(groups) as records:
            steps_against(model, engine, reference, ((0,), (1, 2), (3, 4), (5,)))
        assert_weights(engine, reference.weights)
        assert all(torch.equal(reference.weights[n], before[n]) for n in names)
        owned = {placed.name for o in engine.owned() for placed in o.boxes}
        assert owned or groups["dp_cp"].size > 1, "or another replica has all that is left"
        assert not owned & set(names)
        assert all(model.store.handles[n].main_grad is None for n in names)
        trained = {entry.bucket.index for entry in engine.buckets}
        lonely = model.store.handles[names[0]].block.bucket
        alone = all(handle.name in names for handle in lonely.handles)
        assert (lonely.index in trained) != alone
        reduced = [r for r in records if r.kind in ("all_reduce", "reduce_scatter")]
        # Those that are kept in shards are reduced in every microbatch, over gtp some of them.
        assert len(reduced) % len(trained) == 0 or any(b.bucket.gtp for b in engine.buckets)
        if engine.gatherers and not lonely.sharded and alone:
            assert lonely.blocks[0].ready, "what nobody writes is never gathered"


def evaluated(groups: Groups, config: Config) -> None:
    """Forwards between steps, also while the first gathers are under way, change nothing."""
    model, engine = built(groups, **config)
    reference = Reference(groups["dense_dp"].size)
    lane = groups["dense_dp"].rank

    def look() -> None:
        with engine.evaluation(), torch.no_grad():
            for index in (20, 21):
                ids, targets = tokens(lane, index)
                logits = reference_loss(reference, ids, targets)
                assert relative_error(model.loss(ids, targets), logits) <= 1e-6
        assert all(gatherer.pool.live_bytes == 0 for gatherer in engine.gatherers)

    def fail() -> None:
        with contextlib.suppress(Stop), engine.evaluation(), torch.no_grad():
            model.store.handles["table"].embedding(tokens(lane, 20)[0])
            raise Stop
        assert all(gatherer.pool.live_bytes == 0 for gatherer in engine.gatherers)

    fail()
    look()
    for indices in ((0,), (1, 2), (3,), (4, 5)):
        train(model, engine, indices)
        wanted = reference.gradients(indices)
        assert_gradients(engine, wanted)
        if indices[0] == 3:
            look()  # before the optimizer
        update(engine)
        engine.start_param_sync(force_sync=indices[0] == 1)
        reference.update(wanted)
        look()
        fail()
        look()
    assert all(gatherer.counts.mismatches == 0 for gatherer in engine.gatherers)
    engine.begin_step()
    with pytest.raises(ValueError, match="evaluation inside a step: finish"), engine.evaluation():
        pass
    engine.abort()


def reference_loss(reference: Reference, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the reference's loss of one microbatch."""
    return plain_loss(reference.weights, ids, targets)


class Stop(Exception):
    """What goes wrong in a step."""


class _Fails(torch.autograd.Function):
    """The identity, whose backward fails."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise Stop


def failed(groups: Groups, config: Config) -> None:
    """A step that fails in forward or in backward leaves nothing behind."""
    model, engine = built(groups, **config)
    reference = Reference(groups["dense_dp"].size)
    lane, use = groups["dense_dp"].rank, model.store.handles

    def in_forward() -> None:
        use["first"].linear(use["table"].embedding(tokens(lane, 9)[0]), use["first.bias"])
        raise Stop

    def in_backward() -> None:
        ids, targets = tokens(lane, 9)
        hidden = _Fails.apply(use["first"].linear(use["table"].embedding(ids), use["first.bias"]))
        logits = use["table"].linear(use["third"].linear(torch.tanh(hidden) * use["scale"].use()))
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        engine.backward(loss, last=True)

    for first, fail in ((0, in_forward), (3, in_backward), (6, in_forward), (9, in_backward)):
        engine.begin_step(2)
        engine.backward(model.loss(*tokens(lane, first)), last=False)
        with pytest.raises(Stop):
            fail()
        engine.abort()
        assert engine.pool.live_bytes == 0
        assert all(gatherer.pool.live_bytes == 0 for gatherer in engine.gatherers)
        with pytest.raises(ValueError, match=r"backward outside a step: call begin_step\(\) first"):
            engine.backward(torch.zeros(()), last=True)
        with pytest.raises(ValueError, match=r"finish outside a step: call begin_step\(\) first"):
            engine.finish()
        steps_against(model, engine, reference, ((first + 1, first + 2),))
    assert_weights(engine, reference.weights)


def gathered(groups: Groups, config: Config) -> None:
    """What each rank writes into its own range is everywhere after a parameter sync."""
    model, engine = built(groups, bucket_bytes=400, **config)
    for bucket in model.store.buckets:
        bucket.data.fill_(torch.nan)
    whole = {}
    for owned in engine.owned():
        for placed in owned.boxes:
            shape = placed.shape
            numbers = torch.arange(1.0, torch.Size(shape).numel() + 1).view(shape)
            whole[placed.name] = numbers
            placed.of(owned.weights).copy_(cut(numbers, placed.box))
    engine.start_param_sync(force_sync=True)
    with engine.evaluation():
        for name, handle in model.store.handles.items():
            numbers = torch.arange(1.0, handle.get().numel() + 1).view(SHAPES[name])
            assert torch.equal(handle.get(), numbers)
    assert whole


def reordered(groups: Groups, config: Config) -> None:
    """Layers in another order in one step and back: counted, gathered on demand, exact."""
    model, engine = built(groups, **config)
    reference = Reference(groups["dense_dp"].size)
    steps_against(model, engine, reference, ((0, 1), (2, 3), (4, 5)))
    before = [gatherer.counts.mismatches for gatherer in engine.gatherers]
    lane, use = groups["dense_dp"].rank, model.store.handles
    engine.begin_step(2)
    for index in (6, 7):
        spare = torch.sin(use["spare"].use()).sum(0)
        scale = use["scale"].use()  # the gate comes before the hidden layer
        ids, targets = tokens(lane, index)
        hidden = use["first"].linear(use["table"].embedding(ids), use["first.bias"])
        hidden = torch.tanh(hidden) * scale + spare
        hidden = torch.tanh(use["second"].linear(hidden, use["second.bias"]))
        logits = use["table"].linear(hidden + use["third"].linear(hidden))
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        engine.backward(loss, last=index == 7)
    engine.finish()
    wanted = reference.gradients((6, 7))
    assert_gradients(engine, wanted)
    update(engine)
    engine.start_param_sync()
    reference.update(wanted)
    planned = [gatherer.reshards or gatherer.prefetch for gatherer in engine.gatherers]
    found = [gatherer.counts.mismatches for gatherer in engine.gatherers]
    assert found == [count + follows for count, follows in zip(before, planned, strict=True)]
    steps_against(model, engine, reference, ((8, 9), (10, 11), (12,)))
    for gatherer, earlier, follows in zip(engine.gatherers, before, planned, strict=True):
        if follows:
            assert gatherer.counts.mismatches <= earlier + 2
            assert gatherer.current_plan is not None
            assert gatherer.counts.peak_bytes <= gatherer.budget


def two_models(groups: Groups, config: Config) -> None:
    """Two engines in one process, their steps interleaved, do not see each other."""
    lane = groups["dense_dp"].rank
    pairs = [built(groups, **config) for _ in range(2)]
    references = [Reference(groups["dense_dp"].size) for _ in range(2)]
    for step in range(3):
        for _, engine in pairs:
            engine.begin_step(2)
        for last in (False, True):
            for number, (model, engine) in enumerate(pairs):
                index = 10 * number + 2 * step + last
                engine.backward(model.loss(*tokens(lane, index)), last=last)
        for number, (_, engine) in enumerate(pairs):
            engine.finish()
            wanted = references[number].gradients(
                [10 * number + 2 * step, 10 * number + 2 * step + 1]
            )
            assert_gradients(engine, wanted)
            update(engine)
            references[number].update(wanted)
        for _, engine in pairs:
            engine.start_param_sync()


def split(groups: Groups, config: Config) -> None:
    """Weight gradients a microbatch later are those of the unsplit backward, to the bit."""
    lane = groups["dense_dp"].rank
    whole, halves = built(groups, **config), built(groups, **config)
    for indices in ((0, 1, 2), (3, 4, 5), (6,)):
        train(*whole, indices)
        model, engine = halves
        engine.begin_step(len(indices))
        waiting = None
        for i in indices:
            loss = model.loss(*tokens(lane, i))
            with model.store.defer() as queue:
                engine.backward(loss, last=False)
            assert len(queue) == 9, "table twice, two biased layers, scale, spare, third"
            if waiting is not None:
                waiting.drain()
            waiting = queue
        assert engine.launched_in_backward == 0
        engine.set_is_last_backward(True)
        waiting.drain()
        assert engine.launched_in_backward == whole[1].launched_in_backward > 0
        engine.finish()
        for one, other in zip(whole[1].owned(), engine.owned(), strict=True):
            assert torch.equal(one.gradients, other.gradients)
        for each in (whole[1], engine):
            update(each)
            each.start_param_sync()


def too_many_uses(groups: Groups, config: Config) -> None:
    """A weight used once more than declared: refused if its reduction has begun, else summed."""
    model, engine = built(groups, **config)
    lane = groups["dense_dp"].rank
    engine.begin_step()
    loss = model.loss(*tokens(lane, 0)) + model.store.handles["scale"].use().sum()
    if engine.placement.gradient:
        engine.backward(loss, last=True)
        engine.finish()
        wanted = Reference(groups["dense_dp"].size).gradients((0,))
        wanted["scale"] += groups["dense_dp"].size
        assert_gradients(engine, wanted)
    else:
        with pytest.raises(ValueError, match="scale got a gradient after the reduction"):
            engine.backward(loss, last=True)
        engine.abort()


def narrow(groups: Groups, config: Config) -> None:
    """Gradients that are filled and sent in bf16, summed in bf16 or in fp32."""
    lanes = groups["dense_dp"].size
    for wide in (False, True) if config["strategy"] != "no_shard" else (False,):
        model, engine = built(
            groups, grad_dtype=torch.bfloat16, fp32_accumulation=wide, bucket_bytes=400, **config
        )
        reference = Reference(lanes)
        for indices in ((0,), (1, 2, 3), (4, 5)):
            with trace(groups) as records:
                train(model, engine, indices)
            # every put and every sum rounds to 8 bits: 2^-9 each
            assert_gradients(engine, reference.gradients(indices), bound=len(indices) * 2**-7)
            kinds = {r.kind for r in records if r.dtype == "bfloat16"}
            sums = "all_to_all" if wide else "reduce_scatter"
            over_gtp = any(entry.bucket.gtp for entry in engine.buckets)
            wanted = {sums} if engine.sharded else {"all_reduce"}
            assert kinds == (wanted | {"reduce_scatter"} if over_gtp and not wide else wanted)
        wanted_dtype = torch.float32 if wide or engine.placement.gradient else torch.bfloat16
        for entry in engine.buckets:  # what is kept in shards over microbatches is fp32
            assert entry.gradients.dtype is (
                torch.float32 if entry.every_microbatch else wanted_dtype
            )


def narrow_weights(groups: Groups, config: Config) -> None:
    """Weights in bf16 are kept and gathered in bf16, their gradients summed in fp32."""
    model, engine = built(groups, dtype=torch.bfloat16, bucket_bytes=400, **config)
    reference = Reference(groups["dense_dp"].size)
    rounded = {n: w.bfloat16().double() for n, w in reference.weights.items()}
    reference.weights = rounded
    for indices in ((0,), (1, 2), (3, 4)):
        with trace(groups) as records:
            engine.start_param_sync()
            train(model, engine, indices)
        # activations round to 8 bits at every product
        assert_gradients(engine, reference.gradients(indices), bound=4e-2)
        gathered = {r.dtype for r in records if r.kind == "all_gather"} - {"int64"}
        assert gathered == ({"bfloat16"} if engine.gatherers else set())
        reduced = {r.dtype for r in records if r.kind in ("all_reduce", "reduce_scatter")}
        assert reduced == {"float32"}
    assert {o.gradients.dtype for o in engine.owned()} == {torch.float32}


CASES: tuple[Callable[[Groups, Config], None], ...] = (
    unused,
    frozen,
    evaluated,
    failed,
    gathered,
    reordered,
    two_models,
    split,
    too_many_uses,
    narrow,
    narrow_weights,
)


def all_strategies(rank: int, world: int, case: Callable[[Groups, Config], None]) -> None:
    """Run a case for every strategy: plainly, then with early gathers and late collectives."""
    run_case(ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank), case)


def weights_over_gtp(rank: int, world: int, case: Callable[[Groups, Config], None]) -> None:
    """The same where two ranks shard the matrices over gtp."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, gtp=2), rank=rank)
    for strategy in STRATEGIES[:3]:
        model, engine = built(groups, strategy=strategy)
        assert {b.gtp for b in model.store.buckets} == {True, False}
        assert len(engine.gatherers) == 1 + engine.sharded
    run_case(groups, case)


def run_case(groups: Groups, case: Callable[[Groups, Config], None]) -> None:
    """Run a case for every strategy, twice."""
    for strategy in STRATEGIES:
        case(groups, {"strategy": strategy})
        config: Config = {"strategy": strategy, "overlap_param_gather": strategy != "no_shard"}
        if case is too_many_uses:
            case(groups, config)  # it writes what is under way, and says so
            continue
        with simulated(groups, Late()) as link:
            case(groups, config)
        assert link.count > 0 or (case is gathered and strategy == "no_shard")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_cases_on_two_ranks(case: Callable[[Groups, Config], None]):
    run_ranks(all_strategies, 2, case)


def replicas_over_gtp(rank: int, world: int, case: Callable[[Groups, Config], None]) -> None:
    """The same where weights over gtp share buckets, whose shards two replicas hold."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, gtp=2), rank=rank)
    for strategy in STRATEGIES[:3]:
        for per in ("microbatch", "step") if strategy in STRATEGIES[:2] else ("microbatch",):
            config: Config = {"strategy": strategy, "bucket_bytes": 150}
            config["gtp_reduce_scatter_per"] = per
            model, _ = built(groups, **config)
            several = [len(bucket.blocks) for bucket in model.store.buckets if bucket.gtp]
            assert len(several) > 1
            assert max(several) > 1
            with simulated(groups, Late()):
                case(groups, config)


@pytest.mark.parametrize(
    "case",
    [
        unused,
        frozen,
        reordered,
        # Of every change are two lanes and two gtp ranks, each with these.
        *(
            pytest.param(case, marks=pytest.mark.slow(seconds=4))
            for case in (evaluated, failed, two_models, split)
        ),
    ],
    ids=lambda case: case.__name__,
)
def test_on_two_gtp_ranks_and_two_replicas(case: Callable[[Groups, Config], None]):
    run_ranks(replicas_over_gtp, 4, case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_on_two_gtp_ranks(case: Callable[[Groups, Config], None]):
    run_ranks(weights_over_gtp, 2, case)


def disagreeing(rank: int, world: int) -> None:
    """Need two buckets of one size in another order on each rank: weights are mixed up."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    for debug in (True, False):
        model, engine = built(groups, strategy="optim_grads_params", debug=debug)
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
            assert {r.kind for r in records} == {"reduce_scatter"}, "nobody compares"


def test_debug_mode_reports_ranks_using_weights_in_other_order():
    run_ranks(disagreeing, 2)
