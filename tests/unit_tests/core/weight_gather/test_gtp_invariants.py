# SPDX-License-Identifier: Apache-2.0
"""Invariants of generalized tensor parallelism: a test for each fault reported for Megatron-LM, and
for cases that its own tests leave out.

`INVARIANTS` lists all invariants; this file tests the invariants that no other suite covers.
"""

from __future__ import annotations

import ast
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.comm import trace
from megatron.core.models import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.weight_gather import Gatherer, Storage, WeightStore, owned_range
from megatron.core.weight_sharding import loss_factor
from megatron.training.config.resolve import resolve
from megatron.training.distributed_context import rank_grid
from tests.parity.pieces import assembled, local_chunks
from tests.parity.rows import row_with
from tests.parity.training import gpt_config
from tests.support.pretended_groups import pretended_groups
from tests.support.ranks import run_ranks
from tests.support.simulated_links import Early, simulated
from tests.unit_tests.core.distributed.engine_steps import (
    Reference,
    assert_gradients,
    build_engine,
    slice_box,
    train,
    update,
)
from tests.unit_tests.core.distributed.expert_weights import ExpertModel, assemble, full_gradients
from tests.unit_tests.training.small_config import small_config

ROOT = Path(__file__).parents[4]
UNIT, CORE = "tests/unit_tests", "tests/unit_tests/core"
THIS_FILE = f"{CORE}/weight_gather/test_gtp_invariants.py"
POOL, PLAN = f"{CORE}/weight_gather/test_buffer_pool.py", f"{CORE}/weight_gather/test_plan.py"
STEPS = f"{CORE}/distributed/test_odd_steps.py"
ORDER = f"{CORE}/distributed/test_stream_order.py"
GRAPHS = f"{UNIT}/training/test_full_iteration.py"
PARITY, FAULTS = "tests/parity/test_parity.py", "tests/parity/test_mutants.py"
CHECKPOINT = f"{CORE}/dist_checkpointing/test_checkpoint_experts.py"
RUNS = "tests/functional_tests/test_gtp.py"

#: (Megatron-LM's pull request or issue, the invariant, the test's file, the test)
INVARIANTS: tuple[tuple[str, str, str, str], ...] = (
    # Faults fixed after the first version.
    ("#6077", "a captured step keeps all tensors that backward needs", GRAPHS,
     "test_weights_over_gtp_are_gathered_inside_the_graph"),
    ("#6207", "adjacent blocks of equal shape are gathered into distinct buffers", THIS_FILE,
     "test_adjacent_blocks_of_equal_shape_use_distinct_buffers"),
    ("#6080", "expert gradients are summed and counted over expert ranks", THIS_FILE,
     "test_expert_gradients_are_summed_over_expert_ranks"),
    ("#6080", "a wrong group for experts is detected", FAULTS, "test_planted_fault_is_detected"),
    ("#6060", "a buffer is written after its last reader", ORDER,
     "test_interleavings_compute_the_same_bits"),
    ("#6060", "live buffers never share storage", POOL,
     "test_live_buffers_never_share_storage"),
    ("#6263", "each gtp rank has its own pipeline", THIS_FILE,
     "test_each_gtp_rank_has_its_own_pipeline"),
    ("#6234, #6687", "groups come from the caller; a missing group raises", THIS_FILE,
     "test_missing_process_group_raises"),
    ("#6242", "a tied weight is reduced once, with the right bits", THIS_FILE,
     "test_tied_weight_is_reduced_once_per_microbatch"),
    ("#6242", "multi-token prediction trains as in a single process", PARITY,
     "test_gather_formats_train_like_encoded_weights"),
    ("#6407", "weights gathered again for recomputation are complete", PARITY,
     "test_gather_formats_train_like_encoded_weights"),
    ("#6446", "modules that opt in are sharded over gtp", PARITY,
     "test_opted_in_modules_are_sharded_over_gtp"),
    ("#6503", "fused projections are stored as logical tensors", THIS_FILE,
     "test_shards_of_any_layout_are_boxes_of_the_same_tensors"),
    ("#6388", "a gather waits for the optimizer's updates", STEPS,
     "test_unusual_steps_match_reference_with_gtp_replicas"),
    ("#6565", "no placeholder gradient reaches a parameter", THIS_FILE,
     "test_backward_leaves_gradients_only_in_buffers"),
    ("#6569", "initial values need no process group", THIS_FILE,
     "test_shards_of_any_layout_are_boxes_of_the_same_tensors"),
    ("#6624", "gradients are reduced in their storage dtype", STEPS,
     "test_unusual_steps_match_reference_on_two_gtp_ranks"),
    ("#6525", "a replay gathers the updated weights", GRAPHS,
     "test_weights_over_gtp_are_gathered_inside_the_graph"),
    ("#6717", "batches, losses and evaluation count gtp ranks", THIS_FILE,
     "test_batches_and_losses_count_gtp_ranks"),
    ("#6717", "validation losses equal a single process", RUNS,
     "test_run_resumes_with_and_without_weight_shards"),
    ("#6696", "pending collectives are waited for, also after a failure", STEPS,
     "test_unusual_steps_match_reference_on_two_gtp_ranks"),
    ("#6765", "without gtp no gtp code runs", RUNS,
     "test_explicit_single_weight_shard_changes_nothing"),
    ("#6775", "every element has one writer, without process groups", THIS_FILE,
     "test_shards_of_any_layout_are_boxes_of_the_same_tensors"),
    ("#6740", "Muon orthogonalizes logical matrices", PARITY,
     "test_other_optimizers_update_like_a_single_process"),
    ("one block ahead", "deeper prefetch stays within its bytes", PLAN,
     "test_prefetch_bytes_count_beyond_the_next_block"),
    # Faults present in Megatron-LM's main branch, or for a long time.
    ("#7165", "one scale for all gradients, whatever gtp and egtp", THIS_FILE,
     "test_expert_gradients_are_summed_over_expert_ranks"),
    ("#7161", "gate and up are two tensors in a checkpoint", CHECKPOINT,
     "test_experts_load_on_any_other_grid"),
    ("#7168", "padding moves nothing in a checkpoint", CHECKPOINT,
     "test_experts_load_on_any_other_grid"),
    ("", "a chunk has as many offsets as sizes", THIS_FILE,
     "test_shards_of_any_layout_are_boxes_of_the_same_tensors"),
    ("#6986", "biases and norms are not sharded, and shapes do not depend on gtp", THIS_FILE,
     "test_unsharded_weights_keep_their_full_shape"),
    ("#6986", "tied embeddings train as in a single process", PARITY,
     "test_gather_formats_train_like_encoded_weights"),
    ("#7356", "a missing group differs from a group of one rank", THIS_FILE,
     "test_missing_process_group_raises"),
    ("#6778", "norms and zeros do not count padding", THIS_FILE,
     "test_norms_count_every_element_once_and_no_padding"),
    ("", "optimizer state goes to any layout", CHECKPOINT,
     "test_experts_load_on_any_other_grid"),
    ("#7470", "gradients in flight are bounded in bytes",
     f"{CORE}/distributed/test_reducing_bytes.py",
     "test_gtp_reduction_bytes_match_the_formula"),
    ("", "a pool accepts only its own buffers back", POOL,
     "test_buffer_is_released_once_and_only_by_its_own_tensor"),
    ("", "prefetch follows the order of uses", STEPS,
     "test_unusual_steps_match_reference_on_two_gtp_ranks"),
    ("", "the gradient of an embedding may come later", STEPS,
     "test_unusual_steps_match_reference_on_two_gtp_ranks"),
    # Cases that Megatron-LM's tests leave out.
    ("", "egtp differs from gtp", THIS_FILE, "test_expert_gradients_are_summed_over_expert_ranks"),
    ("", "saved on one layout and loaded on another", RUNS,
     "test_run_resumes_with_and_without_weight_shards"),
    ("", "initial values do not depend on the layout", THIS_FILE,
     "test_shards_of_any_layout_are_boxes_of_the_same_tensors"),
    ("", "all axes together against a single process", PARITY,
     "test_layout_trains_like_a_single_process"),
    ("", "a wrong gradient scale changes updates; ranks have different data", FAULTS,
     "test_planted_fault_is_detected"),
    ("", "evaluations, failures, a changed order, two models", STEPS,
     "test_unusual_steps_match_reference_on_two_gtp_ranks"),
)  # fmt: skip

GTP = "--tensor-parallel-num-weight-shards"
#: By recurrent mixer: layouts of three to eight ranks, mostly with gtp different from egtp.
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
#: Models with gated experts, biases, a tied embedding, padded vocabulary and padded shards.
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
    """Return the weights of a rank of `grid`, without communication."""
    single = grid.world_size == 1
    groups = ProcessGroupCollection.single() if single else pretended_groups(grid, rank)
    return GPTModel(gpt_config(row), groups, seed=7, storage=Storage(strategy=strategy)).store


@pytest.mark.parametrize("row", MODELS, ids=lambda row: row["mixer"])
def test_shards_of_any_layout_are_boxes_of_the_same_tensors(row: dict):
    expected = assembled(local_chunks(store_of(row, RankGrid(world_size=1), 0)))
    for index, degrees in enumerate(GRIDS[row["mixer"]]):
        grid = RankGrid(**degrees)
        strategy = ("no_shard", "optim", "optim_grads")[index % 3]
        stores = [store_of(row, grid, rank, strategy) for rank in range(grid.world_size)]
        holders, declared_ranks = defaultdict(list), {}
        for rank, store in enumerate(stores):
            for handle in store.handles.values():
                for chunk in store.chunks(handle):
                    assert len(chunk.offsets) == chunk.tensor.ndim == len(chunk.shape)
                    assert tuple(chunk.shape) == tuple(expected[chunk.name].shape)
                    box = chunk.name, tuple(chunk.offsets), tuple(chunk.tensor.shape)
                    holders[box].append(rank)
                    assert (
                        declared_ranks.setdefault(box, chunk.replica_ranks) == chunk.replica_ranks
                    )
        # A writer is chosen among a box's replica_ranks: exactly the ranks that hold the box.
        assert {box: tuple(ranks) for box, ranks in holders.items()} == declared_ranks
        numel = sum(math.prod(sizes) for _, _, sizes in holders)
        assert numel == sum(t.numel() for t in expected.values()), "each element is in one box"
        actual = assembled(shard for store in stores for shard in local_chunks(store))
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], values) for name, values in expected.items()), degrees


@pytest.mark.parametrize("row", MODELS, ids=lambda row: row["mixer"])
def test_unsharded_weights_keep_their_full_shape(row: dict):
    for degrees in GRIDS[row["mixer"]]:
        grid = RankGrid(**degrees)
        without_gtp = {axis: size for axis, size in degrees.items() if axis not in ("gtp", "egtp")}
        store, plain = store_of(row, grid, 1), store_of(row, RankGrid(**without_gtp), 1)
        shapes = {name: handle.shape for name, handle in plain.handles.items()}
        assert {name: handle.shape for name, handle in store.handles.items()} == shapes
        unsharded = [handle for handle in store.handles.values() if not handle.sharding.gtp]
        assert len(unsharded) > 5
        assert {len(handle.shape) for handle in unsharded} >= {1}
        for handle in unsharded:
            assert handle.anchor.shape == handle.shape, handle
        gtp_buckets = [b for b in store.buckets if b.gtp]
        assert sum(len(bucket.handles) for bucket in gtp_buckets) > 5
        assert all(not bucket.sharded for bucket in store.buckets if not bucket.gtp)


@pytest.mark.parametrize("row", MODELS, ids=lambda row: row["mixer"])
def test_norms_count_every_element_once_and_no_padding(row: dict):
    """The square of the norm of ones, padding included, is the number of elements."""
    for index, degrees in enumerate(GRIDS[row["mixer"]]):
        grid, total, padding = RankGrid(**degrees), 0.0, 0
        strategy = ("optim", "no_shard", "optim_grads")[index % 3]
        for rank in range(grid.world_size):
            store = store_of(row, grid, rank, strategy)
            for bucket in store.buckets:
                low, high = bucket.owned_range
                owned = owned_range(store, bucket, torch.ones(high - low))
                assert owned.norm_group == "world"
                squares = sum(float(owned.gradients[a:b].square().sum()) for a, b in owned.counted)
                total += squares / owned.replicas
                padding += high - low - sum(box.numel for box in owned.boxes)
        assert padding > 0
        assert total == store.num_parameters, degrees


def test_each_gtp_rank_has_its_own_pipeline():
    grid = RankGrid(world_size=16, tp=2, gtp=2, pp=2, cp=2, egtp=4)
    pipelines = grid.ranks(("pp",))
    assert len(pipelines) == 8
    assert sorted(rank for pipeline in pipelines for rank in pipeline) == list(range(16))
    for pipeline in pipelines:
        coordinates = [grid.coordinates(rank) for rank in pipeline]
        assert [rank_coordinates.pop("pp") for rank_coordinates in coordinates] == [0, 1]
        assert len({tuple(sorted(p.items())) for p in coordinates}) == 1, "only pp differs"


def test_missing_process_group_raises():
    """A missing group is neither treated as a single rank nor replaced by another group."""
    complete = pretended_groups(RankGrid(world_size=8, gtp=2, egtp=4), 0)
    for name in ("gtp", "egtp", "gtp_gather", "egtp_gather", "dp_cp", "edp"):
        groups = {n: group for n, group in complete.groups.items() if n != name}
        incomplete = ProcessGroupCollection(complete.grid, complete.rank, groups)
        with pytest.raises(ValueError, match=f"no group '{name}'"):
            GPTModel(gpt_config(MODELS[0]), incomplete, storage=Storage(strategy="optim"))


def test_batches_and_losses_count_gtp_ranks():
    tp = "--tensor-model-parallel-size 2"
    for extra_flags, world, samples in (
        (f"{GTP} 2", 4, 4),
        (f"{tp} {GTP} 4", 8, 4),
        (f"{GTP} 3", 3, 3),
    ):
        run = resolve(small_config(f"{extra_flags} --global-batch-size {samples * 6}"), world)
        grid = rank_grid(run)
        assert grid.gtp > 1
        groups = [pretended_groups(grid, rank) for rank in range(world)]
        sample_and_tp_ranks = {
            (rank_groups["samples"].rank, rank_groups["tp"].rank) for rank_groups in groups
        }
        assert len(sample_and_tp_ranks) == world, (
            "every rank has different samples, except within tp"
        )
        assert {rank_groups["samples"].size for rank_groups in groups} == {samples}
        assert {rank_groups["dense_dp"].size for rank_groups in groups} == {samples}
        # By default each data-parallel rank has one microbatch.
        default_batch = resolve(small_config(extra_flags), world).config.training
        assert default_batch.global_batch_size == samples * default_batch.micro_batch_size
        assert loss_factor(grid, 2) == 1.0 / (samples * 2)


# --- steps on ranks -------------------------------------------------------------------------------


class BufferRecorder:
    """Wrap `unshard` and record each block's buffer."""

    def __init__(self, gatherer: Gatherer) -> None:
        self.gathered: list[tuple[str, int]] = []
        self.unshard = gatherer.unshard
        gatherer.unshard = self._unshard  # type: ignore[method-assign]

    def _unshard(self, block) -> None:
        self.unshard(block)
        handle = block.handles[0]
        self.gathered.append((handle.name, block.views[handle.name].untyped_storage().data_ptr()))

    def adjacent_buffers(self) -> Iterator[tuple[int, int]]:
        """Yield the buffers of each two blocks that are used in succession."""
        for (block, buffer), (next_block, next_buffer) in itertools.pairwise(self.gathered):
            if block != next_block:
                yield buffer, next_buffer


def compare_adjacent_buffers(rank: int, world: int) -> int:
    """Count adjacent gathers of three matrices of equal shape; none may share a buffer."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, gtp=2), rank=rank)
    model, engine = build_engine(groups)
    watch, num_pairs = BufferRecorder(engine.gatherers[0]), 0
    with simulated(groups, Early()):  # bytes arrive at once and would corrupt a buffer in use
        reference = Reference(world)
        for step in range(3):
            watch.gathered.clear()
            train(model, engine, (2 * step, 2 * step + 1))
            expected = reference.gradients((2 * step, 2 * step + 1))
            assert_gradients(engine, expected)
            assert {"first", "second", "third"} <= {name for name, _ in watch.gathered}
            if step > 0:  # the first step gathers a weight after releasing the previous weight
                pairs = list(watch.adjacent_buffers())
                assert all(buffer != next_buffer for buffer, next_buffer in pairs)
                num_pairs += len(pairs)
            update(engine)
            engine.start_param_sync()
            reference.update(expected)
    gathered = watch.gathered
    assert len({buffer for _, buffer in gathered}) < len({name for name, _ in gathered})
    return num_pairs


def test_adjacent_blocks_of_equal_shape_use_distinct_buffers():
    assert all(num_pairs > 20 for num_pairs in run_ranks(compare_adjacent_buffers, 2))


def count_tied_reductions(rank: int, world: int, reduce_per: str) -> None:
    """Compare the reduce-scatters of a table that is both embedding and head."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, gtp=2), rank=rank)
    model, engine = build_engine(groups, gtp_reduce_scatter_per=reduce_per)
    reference = Reference(world)
    table = model.store.handles["table"]
    assert table.uses == 2
    for indices in ((0, 1, 2), (3, 4, 5), (6, 7, 8)):
        with trace(groups) as records:
            train(model, engine, indices)
        expected = reference.gradients(indices)
        assert_gradients(engine, expected)
        sent = Counter(r.bytes for r in records if r.kind == "reduce_scatter")
        blocks = Counter(b.unsharded_bytes for bucket in model.store.buckets if bucket.gtp
                         for b in bucket.blocks)  # fmt: skip
        assert blocks[table.block.unsharded_bytes] == 1, "no other block has the table's size"
        reductions = 1 if reduce_per == "step" else len(indices)
        assert sent == {size: count * reductions for size, count in blocks.items()}
        update(engine)
        engine.start_param_sync()
        reference.update(expected)


@pytest.mark.parametrize("reduce_per", ["microbatch", "step"])
def test_tied_weight_is_reduced_once_per_microbatch(reduce_per: str):
    run_ranks(count_tied_reductions, 2, reduce_per)


def step_with_poisoned_memory(rank: int, world: int) -> None:
    """Run a step with NaN in unused memory; check that autograd has stored no gradients."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, gtp=2), rank=rank)
    for strategy in ("no_shard", "optim_grads"):
        model, engine = build_engine(groups, strategy=strategy)
        train(model, engine, (0, 1))
        assert_gradients(engine, Reference(world).gradients((0, 1)))
        for handle in model.store.handles.values():
            # WeightParameter.grad raises: read the attribute of torch.Tensor.
            assert torch.Tensor.grad.__get__(handle.anchor) is None, handle
            assert not handle.anchor._backward_hooks, handle


def test_backward_leaves_gradients_only_in_buffers():
    run_ranks(step_with_poisoned_memory, 2)


#: Grids of four ranks whose expert degrees differ from the dense degrees in one or more axes.
EXPERT_GRIDS: Sequence[tuple[dict[str, int], str]] = (
    ({"gtp": 4, "egtp": 2}, "no_shard"),
    ({"gtp": 2, "egtp": 4}, "optim"),
    ({"gtp": 4}, "optim"),
    ({"egtp": 4}, "optim_grads"),
    ({"tp": 2, "gtp": 2, "etp": 2}, "no_shard"),
    ({"tp": 2, "etp": 1, "egtp": 2}, "optim_grads"),
)
SGD = OptimizerConfig(kind="sgd", clip_grad=40.0, count_zeros=True)


def train_experts(rank: int, world: int) -> list:
    """Train a step on every grid: gradients are exact sums of integers. Return all shards."""
    torch.set_num_threads(1)
    shards_by_grid = []
    expected = full_gradients(0, 2)
    norm = sum(float(w.double().square().sum()) for w in expected.values()) ** 0.5
    for degrees, strategy in EXPERT_GRIDS:
        groups = ProcessGroupCollection.create(RankGrid(world_size=world, **degrees), rank=rank)
        model = ExpertModel(groups, parallel={"strategy": strategy}, optimizer=SGD)
        model.gradients(0, 2)
        for owned in model.engine.owned():
            for box in owned.boxes:
                gradient, full_gradient = box.of(owned.gradients), expected[box.name]
                assert torch.equal(gradient, slice_box(full_gradient, box.box)), (degrees, box)
        step_result = model.update()
        assert abs(step_result.grad_norm - norm) <= 1e-6 * norm, degrees
        assert step_result.num_zeros == sum(int((w == 0).sum()) for w in expected.values()), degrees
        shards_by_grid.append(model.shards())
    return shards_by_grid


def test_expert_gradients_are_summed_over_expert_ranks():
    single = ExpertModel(ProcessGroupCollection.single(), optimizer=SGD)
    single.gradients(0, 2)
    single.update()
    expected = assemble(single.shards())
    for grid_shards in zip(*run_ranks(train_experts, 4), strict=True):
        actual = assemble([shard for shards in grid_shards for shard in shards])
        for name, values in expected.items():
            assert (actual[name] - values).abs().max() <= 1e-6, name
