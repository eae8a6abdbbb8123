# SPDX-License-Identifier: Apache-2.0
"""What must hold under generalized tensor parallelism: a test for each fault that is known from
Megatron-LM, and for what its own tests leave out.

`INVARIANTS` names them all; those that no other suite sees are in this file.
"""

from __future__ import annotations

import ast
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from megatron.core.comm import trace
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.weight_gather import Gatherer, Storage, WeightStore, owned_range
from megatron.core.weight_sharding import loss_factor
from megatron.training.config.resolve import resolve
from megatron.training.distributed_context import rank_grid
from tests.parity.pieces import assembled, weight_pieces
from tests.parity.rows import row_with
from tests.parity.training import gpt_config
from tests.support.pretended_groups import pretended_groups
from tests.support.ranks import run_ranks
from tests.support.simulated_links import Early, simulated
from tests.unit_tests.core.distributed.engine_steps import (
    Reference,
    assert_gradients,
    built,
    cut,
    train,
    update,
)
from tests.unit_tests.core.distributed.expert_weights import ExpertModel, whole_gradients, whole_of
from tests.unit_tests.training.small_config import small_config

ROOT = Path(__file__).parents[4]
UNIT, CORE = "tests/unit_tests", "tests/unit_tests/core"
HERE = f"{CORE}/weight_gather/test_gtp_invariants.py"
POOL, PLAN = f"{CORE}/weight_gather/test_buffer_pool.py", f"{CORE}/weight_gather/test_plan.py"
STEPS = f"{CORE}/distributed/test_odd_steps.py"
ORDER = f"{CORE}/distributed/test_stream_order.py"
GRAPHS = f"{UNIT}/training/test_full_iteration.py"
PARITY, FAULTS = "tests/parity/test_parity.py", "tests/parity/test_mutants.py"
CHECKPOINT = f"{CORE}/dist_checkpointing/test_checkpoint_experts.py"
RUNS = "tests/functional_tests/test_gtp.py"

#: (Megatron-LM's pull request or issue, what must hold, where it is tested)
INVARIANTS: tuple[tuple[str, str, str, str], ...] = (
    # Faults that were fixed after the first version.
    ("#6077", "a recorded step holds all that backward needs", GRAPHS,
     "test_weights_over_gtp_are_gathered_inside_the_graph"),
    ("#6207", "neighbours of one shape are gathered into buffers apart", HERE,
     "test_neighbours_of_one_shape_have_buffers_apart"),
    ("#6080", "experts are summed and counted over their own ranks", HERE,
     "test_experts_are_summed_over_their_own_ranks"),
    ("#6080", "a wrong group for experts is noticed", FAULTS, "test_a_planted_fault_is_noticed"),
    ("#6060", "a buffer is written after its last reader", ORDER,
     "test_uses_of_memory_are_in_order"),
    ("#6060", "no storage is leased twice at a time", POOL,
     "test_live_buffers_never_share_storage"),
    ("#6263", "gtp peers are data-parallel ranks to pipelines too", HERE,
     "test_every_gtp_rank_has_a_pipeline_of_its_own"),
    ("#6234, #6687", "groups come from the caller, and one that is missing raises", HERE,
     "test_a_group_that_is_missing_raises"),
    ("#6242", "a weight of several uses: right bits, one reduction", HERE,
     "test_a_weight_of_two_uses_is_reduced_once_a_microbatch"),
    ("#6242", "further predictions train as in a single process", PARITY,
     "test_weights_in_a_wire_format_train_as_the_encoded_ones_do"),
    ("#6407", "weights gathered again for recomputation stay whole", PARITY,
     "test_weights_in_a_wire_format_train_as_the_encoded_ones_do"),
    ("#6446", "modules that opt in are gathered as the others are", PARITY,
     "test_modules_that_opt_in_are_sharded_over_gtp"),
    ("#6503", "fused projections are stored as logical tensors", HERE,
     "test_shards_of_any_layout_are_boxes_of_the_same_tensors"),
    ("#6388", "a gather waits for what the optimizer's owners send", STEPS,
     "test_on_two_gtp_ranks_and_two_replicas"),
    ("#6565", "no placeholder gradient reaches a parameter", HERE,
     "test_backward_leaves_gradients_only_in_buffers"),
    ("#6569", "initial values need no process group", HERE,
     "test_shards_of_any_layout_are_boxes_of_the_same_tensors"),
    ("#6624", "gradients travel in the dtype they are kept in", STEPS, "test_on_two_gtp_ranks"),
    ("#6525", "a replay gathers the updated weights", GRAPHS,
     "test_weights_over_gtp_are_gathered_inside_the_graph"),
    ("#6717", "batches, losses and evaluation count gtp ranks", HERE,
     "test_batches_and_losses_count_gtp_ranks"),
    ("#6717", "validation losses are those of a single process", RUNS,
     "test_a_run_goes_on_with_and_without_weight_shards"),
    ("#6696", "what is under way is waited for, also after a failure", STEPS,
     "test_on_two_gtp_ranks"),
    ("#6765", "without gtp nothing of it runs", RUNS,
     "test_flags_that_shard_nothing_change_nothing"),
    ("#6775", "every element has one writer, without process groups", HERE,
     "test_shards_of_any_layout_are_boxes_of_the_same_tensors"),
    ("#6740", "Muon orthogonalizes logical matrices", PARITY,
     "test_other_optimizers_move_weights_as_in_the_single_process"),
    ("one block ahead", "deeper prefetch stays within its bytes", PLAN,
     "test_ahead_counts_the_bytes_beyond_the_next_block"),
    # Faults that its head has, or had for long.
    ("#7165", "one scale for all gradients, whatever gtp and egtp", HERE,
     "test_experts_are_summed_over_their_own_ranks"),
    ("#7161", "gate and up are two tensors in a checkpoint", CHECKPOINT,
     "test_experts_load_on_any_other_grid"),
    ("#7168", "padding moves nothing in a checkpoint", CHECKPOINT,
     "test_experts_load_on_any_other_grid"),
    ("", "a chunk has as many offsets as sizes", HERE,
     "test_shards_of_any_layout_are_boxes_of_the_same_tensors"),
    ("#6986", "biases and norms are whole, and shapes know no gtp", HERE,
     "test_what_is_not_sharded_is_whole"),
    ("#6986", "tied embeddings train as in a single process", PARITY,
     "test_weights_in_a_wire_format_train_as_the_encoded_ones_do"),
    ("#7356", "a group that is lost is not one that is off", HERE,
     "test_a_group_that_is_missing_raises"),
    ("#6778", "norms and zeros do not count padding", HERE,
     "test_norms_count_every_element_once_and_no_padding"),
    ("", "optimizer state goes to any layout", CHECKPOINT,
     "test_experts_load_on_any_other_grid"),
    ("#7470", "gradients on their way are bounded by bytes",
     f"{CORE}/distributed/test_reducing_bytes.py",
     "test_bytes_of_weights_over_gtp_are_those_of_the_formula"),
    ("", "a pool takes back only what it leased", POOL,
     "test_buffer_is_released_once_and_only_by_its_own_tensor"),
    ("", "prefetch follows what is used, in any order", STEPS, "test_on_two_gtp_ranks"),
    ("", "the gradient of an embedding may come later", STEPS, "test_on_two_gtp_ranks"),
    # What its tests leave out.
    ("", "egtp apart from gtp", HERE, "test_experts_are_summed_over_their_own_ranks"),
    ("", "saved on one layout and loaded on another", RUNS,
     "test_a_run_goes_on_with_and_without_weight_shards"),
    ("", "initial values do not depend on the layout", HERE,
     "test_shards_of_any_layout_are_boxes_of_the_same_tensors"),
    ("", "all axes together against a single process", PARITY,
     "test_a_layout_trains_as_the_single_process"),
    ("", "updates that a wrong scale would show, other data on every rank", FAULTS,
     "test_a_planted_fault_is_noticed"),
    ("", "evaluations, failures, a changed order, two models", STEPS, "test_on_two_gtp_ranks"),
)  # fmt: skip

GTP = "--tensor-parallel-num-weight-shards"
#: By recurrent block, layouts of four to eight ranks, most with a gtp that is not egtp.
GRIDS: dict[str, Sequence[dict[str, int]]] = {
    "delta": (
        {"world_size": 4, "gtp": 4, "egtp": 2},
        {"world_size": 8, "tp": 2, "gtp": 2, "etp": 1, "ep": 2, "egtp": 4},
    ),
    "mamba": (
        {"world_size": 4, "gtp": 2, "egtp": 4},
        {"world_size": 3, "gtp": 3},
        {"world_size": 4, "tp": 2, "gtp": 2, "etp": 2},
    ),
}
#: With gated experts, biases, a tied embedding; padded vocabulary and shards.
MODELS = tuple(
    row_with(mixer=mixer, experts="softmax", shared="gated", bias="all", tied=True)
    for mixer in GRIDS
)


def test_every_invariant_has_its_test():
    defined = {}
    for file in {file for _, _, file, _ in INVARIANTS}:
        tree = ast.parse((ROOT / file).read_text())
        defined[file] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for _, invariant, file, name in INVARIANTS:
        assert name in defined[file], f"{invariant}: {file} has no {name}"


# --- layouts, without processes -------------------------------------------------------------------


def store_of(row: dict, grid: RankGrid, rank: int, strategy: str = "optim") -> WeightStore:
    """Return the weights of one rank of many; a single one knows no other groups."""
    single = grid.world_size == 1
    groups = ProcessGroupCollection.single() if single else pretended_groups(grid, rank)
    return GPTModel(gpt_config(row), groups, seed=7, storage=Storage(strategy=strategy)).store


@pytest.mark.parametrize("row", MODELS, ids=lambda row: row["mixer"])
def test_shards_of_any_layout_are_boxes_of_the_same_tensors(row: dict):
    wanted = assembled(weight_pieces(store_of(row, RankGrid(world_size=1), 0)))
    for number, degrees in enumerate(GRIDS[row["mixer"]]):
        grid = RankGrid(**degrees)
        strategy = ("no_shard", "optim", "optim_grads")[number % 3]
        stores = [store_of(row, grid, rank, strategy) for rank in range(grid.world_size)]
        holders, claims = defaultdict(list), {}
        for rank, store in enumerate(stores):
            for handle in store.handles.values():
                for chunk in store.chunks(handle):
                    assert len(chunk.offsets) == chunk.tensor.ndim == len(chunk.shape)
                    assert tuple(chunk.shape) == tuple(wanted[chunk.name].shape)
                    box = chunk.name, tuple(chunk.offsets), tuple(chunk.tensor.shape)
                    holders[box].append(rank)
                    assert claims.setdefault(box, chunk.replica_ranks) == chunk.replica_ranks
        # Writers are chosen among the ranks that are said to hold a box: all that do, and no other.
        assert {box: tuple(ranks) for box, ranks in holders.items()} == claims
        numel = sum(math.prod(sizes) for _, _, sizes in holders)
        assert numel == sum(tensor.numel() for tensor in wanted.values()), "every element once"
        found = assembled(piece for store in stores for piece in weight_pieces(store))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], values) for name, values in wanted.items()), degrees


@pytest.mark.parametrize("row", MODELS, ids=lambda row: row["mixer"])
def test_what_is_not_sharded_is_whole(row: dict):
    for degrees in GRIDS[row["mixer"]]:
        grid = RankGrid(**degrees)
        flat = {axis: size for axis, size in degrees.items() if axis not in ("gtp", "egtp")}
        store, plain = store_of(row, grid, 1), store_of(row, RankGrid(**flat), 1)
        shapes = {name: handle.shape for name, handle in plain.handles.items()}
        assert {name: handle.shape for name, handle in store.handles.items()} == shapes
        small = [handle for handle in store.handles.values() if not handle.sharding.gtp]
        assert len(small) > 5
        assert {len(handle.shape) for handle in small} >= {1}
        for handle in small:
            assert handle.anchor.shape == handle.shape, handle
        over = [b for b in store.buckets if b.gtp]
        assert sum(len(bucket.handles) for bucket in over) > 5
        assert all(not bucket.sharded for bucket in store.buckets if not bucket.gtp)


@pytest.mark.parametrize("row", MODELS, ids=lambda row: row["mixer"])
def test_norms_count_every_element_once_and_no_padding(row: dict):
    """The square of the norm of ones, padding included, is the number of elements."""
    for number, degrees in enumerate(GRIDS[row["mixer"]]):
        grid, total, padding = RankGrid(**degrees), 0.0, 0
        strategy = ("optim", "no_shard", "optim_grads")[number % 3]
        for rank in range(grid.world_size):
            store = store_of(row, grid, rank, strategy)
            for bucket in store.buckets:
                low, high = bucket.owned_range
                part = owned_range(store, bucket, torch.ones(high - low))
                assert part.norm_group == "world"
                squares = sum(float(part.gradients[a:b].square().sum()) for a, b in part.counted)
                total += squares / part.replicas
                padding += high - low - sum(box.numel for box in part.boxes)
        assert padding > 0
        assert total == store.num_parameters, degrees


def test_every_gtp_rank_has_a_pipeline_of_its_own():
    grid = RankGrid(world_size=16, tp=2, gtp=2, pp=2, cp=2, egtp=4)
    lines = grid.ranks(("pp",))
    assert len(lines) == 8
    assert sorted(rank for line in lines for rank in line) == list(range(16))
    for line in lines:
        places = [grid.coordinates(rank) for rank in line]
        assert [place.pop("pp") for place in places] == [0, 1]
        assert len({tuple(sorted(p.items())) for p in places}) == 1, "another rank of some axis"


def test_a_group_that_is_missing_raises():
    """It is neither taken for one rank nor found elsewhere."""
    complete = pretended_groups(RankGrid(world_size=8, gtp=2, egtp=4), 0)
    for name in ("gtp", "egtp", "gtp_gather", "egtp_gather", "dp_cp", "edp"):
        groups = {n: group for n, group in complete.groups.items() if n != name}
        less = ProcessGroupCollection(complete.grid, complete.rank, groups)
        with pytest.raises(ValueError, match=f"no group '{name}'"):
            GPTModel(gpt_config(MODELS[0]), less, storage=Storage(strategy="optim"))


def test_batches_and_losses_count_gtp_ranks():
    tp = "--tensor-model-parallel-size 2"
    for more, world, samples in ((f"{GTP} 2", 4, 4), (f"{tp} {GTP} 4", 8, 4), (f"{GTP} 3", 3, 3)):
        run = resolve(small_config(f"{more} --global-batch-size {samples * 6}"), world)
        grid = rank_grid(run)
        assert grid.gtp > 1
        groups = [pretended_groups(grid, rank) for rank in range(world)]
        lanes = {(one["samples"].rank, one["tp"].rank) for one in groups}
        assert len(lanes) == world, "a sample of its own for every rank but those of tp"
        assert {one["samples"].size for one in groups} == {samples}
        assert {one["dense_dp"].size for one in groups} == {samples}
        # Unless told otherwise each data-parallel rank has one microbatch.
        alone = resolve(small_config(more), world).config.training
        assert alone.global_batch_size == samples * alone.micro_batch_size
        assert loss_factor(grid, 2) == 1.0 / (samples * 2)


# --- steps on ranks -------------------------------------------------------------------------------


class Buffers:
    """Stand before `unshard` and keep where each block was gathered to."""

    def __init__(self, gatherer: Gatherer) -> None:
        self.seen: list[tuple[str, int]] = []
        self.unshard = gatherer.unshard
        gatherer.unshard = self._unshard  # type: ignore[method-assign]

    def _unshard(self, block) -> None:
        self.unshard(block)
        handle = block.handles[0]
        self.seen.append((handle.name, block.views[handle.name].untyped_storage().data_ptr()))

    def neighbours(self) -> Iterator[tuple[int, int]]:
        """Yield the buffers of each two blocks that are needed one after the other."""
        for (one, here), (other, there) in zip(self.seen, self.seen[1:], strict=False):
            if one != other:
                yield here, there


def buffers(rank: int, world: int) -> int:
    """Watch three matrices of one shape, next to each other in forward and backward."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, gtp=2), rank=rank)
    model, engine = built(groups)
    watch, found = Buffers(engine.gatherers[0]), 0
    with simulated(groups, Early()):  # bytes arrive at once: in a buffer that is read, they show
        reference = Reference(world)
        for number in range(3):
            watch.seen.clear()
            train(model, engine, (2 * number, 2 * number + 1))
            wanted = reference.gradients((2 * number, 2 * number + 1))
            assert_gradients(engine, wanted)
            assert {"first", "second", "third"} <= {name for name, _ in watch.seen}
            if number > 0:  # the first step gathers a weight after the one before is released
                pairs = list(watch.neighbours())
                assert all(here != there for here, there in pairs)
                found += len(pairs)
            update(engine)
            engine.start_param_sync()
            reference.update(wanted)
    assert len({where for _, where in watch.seen}) < len({name for name, _ in watch.seen})
    return found


def test_neighbours_of_one_shape_have_buffers_apart():
    assert all(found > 20 for found in run_ranks(buffers, 2))


def uses(rank: int, world: int, reduce_per: str) -> None:
    """Count what is sent for a table that is embedding and head."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, gtp=2), rank=rank)
    model, engine = built(groups, gtp_reduce_scatter_per=reduce_per)
    reference = Reference(world)
    table = model.store.handles["table"]
    assert table.uses == 2
    for indices in ((0, 1, 2), (3, 4, 5), (6, 7, 8)):
        with trace(groups) as records:
            train(model, engine, indices)
        wanted = reference.gradients(indices)
        assert_gradients(engine, wanted)
        sent = Counter(r.bytes for r in records if r.kind == "reduce_scatter")
        blocks = Counter(b.unsharded_bytes for bucket in model.store.buckets if bucket.gtp
                         for b in bucket.blocks)  # fmt: skip
        assert blocks[table.block.unsharded_bytes] == 1, "its size tells it from the others"
        times = 1 if reduce_per == "step" else len(indices)
        assert sent == {size: count * times for size, count in blocks.items()}
        update(engine)
        engine.start_param_sync()
        reference.update(wanted)


@pytest.mark.parametrize("reduce_per", ["microbatch", "step"])
def test_a_weight_of_two_uses_is_reduced_once_a_microbatch(reduce_per: str):
    run_ranks(uses, 2, reduce_per)


def step_with_poisoned_memory(rank: int, world: int) -> None:
    """Run a step whose unused memory held NaN, and look for gradients of autograd's own."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, gtp=2), rank=rank)
    for strategy in ("no_shard", "optim_grads"):
        model, engine = built(groups, strategy=strategy)
        train(model, engine, (0, 1))
        assert_gradients(engine, Reference(world).gradients((0, 1)))
        for handle in model.store.handles.values():
            # Its own property refuses to be read: look behind it.
            assert torch.Tensor.grad.__get__(handle.anchor) is None, handle
            assert not handle.anchor._backward_hooks, handle


def test_backward_leaves_gradients_only_in_buffers():
    run_ranks(step_with_poisoned_memory, 2)


#: Four ranks: experts' degrees that differ from the dense ones in one axis or in all.
EXPERT_GRIDS: Sequence[tuple[dict[str, int], str]] = (
    ({"gtp": 4, "egtp": 2}, "no_shard"),
    ({"gtp": 2, "egtp": 4}, "optim"),
    ({"gtp": 4}, "optim"),
    ({"egtp": 4}, "optim_grads"),
    ({"tp": 2, "gtp": 2, "etp": 2}, "no_shard"),
    ({"tp": 2, "etp": 1, "egtp": 2}, "optim_grads"),
)
SGD = OptimizerConfig(kind="sgd", clip_grad=40.0, count_zeros=True)


def experts(rank: int, world: int) -> list:
    """Train a step on every grid: gradients are sums of whole numbers, known exactly."""
    torch.set_num_threads(1)
    found = []
    wanted = whole_gradients(0, 2)
    norm = sum(float(w.double().square().sum()) for w in wanted.values()) ** 0.5
    for degrees, strategy in EXPERT_GRIDS:
        groups = ProcessGroupCollection.create(RankGrid(world_size=world, **degrees), rank=rank)
        model = ExpertModel(groups, parallel={"strategy": strategy}, optimizer=SGD)
        model.gradients(0, 2)
        for owned in model.engine.owned():
            for placed in owned.boxes:
                got, whole = placed.of(owned.gradients), wanted[placed.name]
                assert torch.equal(got, cut(whole, placed.box)), (degrees, placed)
        result = model.update()
        assert abs(result.grad_norm - norm) <= 1e-6 * norm, degrees
        assert result.num_zeros == sum(int((w == 0).sum()) for w in wanted.values()), degrees
        found.append(model.pieces())
    return found


def test_experts_are_summed_over_their_own_ranks():
    alone = ExpertModel(ProcessGroupCollection.single(), optimizer=SGD)
    alone.gradients(0, 2)
    alone.update()
    wanted = whole_of(alone.pieces())
    for run in zip(*run_ranks(experts, 4), strict=True):
        found = whole_of([piece for pieces in run for piece in pieces])
        for name, values in wanted.items():
            assert (found[name] - values).abs().max() <= 1e-6, name
