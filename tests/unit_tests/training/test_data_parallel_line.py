# SPDX-License-Identifier: Apache-2.0
"""The data-parallel log line: its strategy, and its sizes against the allocated tensors."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from megatron.core import Group, ProcessGroupCollection, RankGrid
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.models.layer_pattern import StageSplit
from megatron.core.moe import MoEConfig
from megatron.core.optimizer import Optimizer, OptimizerConfig
from megatron.core.transformer import AttentionConfig, MLPConfig
from megatron.core.weight_sharding import STRATEGIES, placement
from megatron.training.hooks import Progress
from megatron.training.startup_report import GatheredBytes
from megatron.training.startup_report.parallelism import communicators_line, data_parallel_line
from tests.support.ranks import run_ranks


def build_model(
    groups: ProcessGroupCollection,
    offload: float = 0.0,
    split: StageSplit | None = None,
    experts: int | None = None,
    tied: bool = False,
    vocabulary: int = 64,
    **settings: object,
) -> tuple[GPTModel, DataParallel, Optimizer]:
    """Return a model, its engine and optimizer, of about 100,000 weights.

    Args:
        offload: share of the optimizer's state that is in host memory.
        split: of the layers into pipeline stages.
        experts: of every layer, instead of an MLP.
        tied: embedding and output layer are one weight.
    """
    shape = GPTConfig(
        num_layers=3,
        hidden_size=48,
        vocab_size=vocabulary,
        attention=AttentionConfig(num_attention_heads=4, num_query_groups=2, kv_channels=12),
        mlp=MLPConfig(ffn_hidden_size=160),
        tied=tied,
    )
    if experts is not None:
        moe = MoEConfig(num_experts=experts, ffn_hidden_size=40)
        shape = dataclasses.replace(shape, moe=moe, ffn_pattern="EEE")
    config = DataParallelConfig(**settings)
    model = GPTModel(
        shape,
        groups,
        dtype=torch.bfloat16,
        storage=config.storage(initialize=False),
        split=split,
    )
    engine = DataParallel(model.store, groups, config=config)
    optimizer = Optimizer(engine.owned(), groups, config=OptimizerConfig(offload_fraction=offload))
    return model, engine, optimizer


def build_engine(groups: ProcessGroupCollection, **options: Any) -> tuple[DataParallel, Optimizer]:
    """Return the engine and optimizer of `build_model`."""
    return build_model(groups, **options)[1:]


def bytes_in(line: str) -> list[float]:
    """Return the sizes that a line names, in bytes."""
    return [1e6 * float(number) for number in re.findall(r"([\d.]+) MB", line)]


def check_lines(rank: int, world: int) -> list[str]:
    """Check the sizes in each strategy's line against the allocated tensors; return the lines."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    lines = []
    for strategy in STRATEGIES:
        engine, optimizer = build_engine(groups, strategy=strategy)
        line = data_parallel_line(engine, optimizer)
        weights = sum(b.data.nbytes for b in engine.store.buckets)
        buckets_by_storage = {b.gradients.untyped_storage().data_ptr(): b for b in engine.buckets}
        gradients = sum(b.gradients.untyped_storage().nbytes() for b in buckets_by_storage.values())
        states = [t for r in optimizer.ranges for t in r.named_tensors().values()]
        state = sum(t.nbytes for t in states)
        assert bytes_in(line)[1:4] == pytest.approx([weights, gradients, state], abs=6e3), line
        lines.append(line)
    engine, optimizer = build_engine(groups, strategy="optim")
    engine.placement = placement("no_shard")
    with pytest.raises(ValueError, match="but optim was requested"):
        data_parallel_line(engine, optimizer)
    hybrid = ProcessGroupCollection.create(RankGrid(world_size=world, instances=2), rank=rank)
    settings = {"strategy": "optim_grads_params", "outer": "optim", "overlap_param_gather": True}
    return [*lines, data_parallel_line(*build_engine(hybrid, **settings))]


def test_data_parallel_line_states_strategy_and_sizes():
    plain, optim, grads, params, hybrid = run_ranks(check_lines, 4)[0]
    assert plain.startswith("data parallel: no_shard over 4 ranks; 1 bucket of up to 0.")
    assert optim.startswith("data parallel: optim over 4 ranks; ")
    assert "gathered" not in optim
    assert "gathered" not in grads
    assert "of gradients that are being reduced" in grads
    assert "optim_grads_params over 4 ranks; 5 buckets" in params
    assert "of gathered weights" in params
    assert (
        "optim_grads_params over the 2 ranks of each of 2 instances, optimizer state over all of "
        "them; 5 buckets"
    ) in hybrid
    assert bytes_in(hybrid)[4] > bytes_in(params)[4], (
        "the hybrid run gathers two units instead of one"
    )


def gathered_bytes(rank: int, world: int, tied: bool) -> tuple[list[float], float]:
    """Train over gtp; return the reported bytes of gathered weights, and the measured peak."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, gtp=world), rank=rank)
    model, engine, optimizer = build_model(groups, tied=tied, vocabulary=640)
    line = data_parallel_line(engine, optimizer)
    reported = [line[: line.index(" of gathered weights")].split("at most ")[-1]]
    hook = GatheredBytes(engine, reported.append)
    for step in range(3):
        tokens = torch.arange(2 * 8).view(2, 8) * (step + 1) % 64
        engine.begin_step(1)
        engine.backward(model.loss(tokens, tokens, torch.full((2, 8), 1 / 16))[0], last=True)
        engine.finish()
        engine.start_param_sync()
        hook.on_step_end(Progress(), None)  # type: ignore[arg-type]
    (gatherer,) = (g for g in engine.gatherers if g.reshards)
    return [bytes_in(line)[-1] for line in reported], float(gatherer.counts.peak_bytes)


@pytest.mark.parametrize("tied", [False, True])
def test_data_parallel_line_states_peak_gathered_bytes(tied: bool):
    reported, peak = run_ranks(gathered_bytes, 2, tied)[0]
    assert reported[-1] == pytest.approx(peak, abs=6e3)
    # The head uses the tied weight again after the last layer, where no gather was predicted.
    assert len(reported) == 1 + tied


def stage_lines(rank: int, world: int) -> tuple[str, list[int]]:
    """Return the line of a pipeline of 2 and 1 layers, and this stage's weight and state bytes."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, pp=world), rank=rank)
    engine, optimizer = build_engine(groups, split=StageSplit.even(3, world, last_layers=1))
    weights = sum(bucket.data.nbytes for bucket in engine.store.buckets)
    line = data_parallel_line(engine, optimizer)
    return line, [weights, sum(optimizer.state_bytes(on_host=host) for host in (False, True))]


def test_data_parallel_line_reports_maximum_over_stages():
    (line, (weights, state)), (last_line, (last_weights, _)) = run_ranks(stage_lines, 2)
    assert line == last_line
    assert last_weights < 0.8 * weights, "the first stage has more weights"
    assert "; per rank at most " in line
    assert bytes_in(line)[1] == pytest.approx(weights, abs=6e3)
    assert bytes_in(line)[3] == pytest.approx(state, abs=6e3)


#: Layouts of four ranks in which experts and dense weights have different data-parallel groups.
LAYOUTS = {
    "optim over 1 rank of dense weights and 4 of experts": {"tp": 4, "etp": 1},
    "optim over 2 ranks of dense weights and 4 of experts": {"tp": 2, "etp": 1},
    "optim over 4 ranks of dense weights and 1 of experts": {"ep": 4},
    "optim over the 2 ranks of dense weights and 1 of experts in each of 2 instances": {
        "ep": 2,
        "instances": 2,
    },
    "optim over 2 ranks": {"tp": 2},
}


def check_expert_lines(rank: int, world: int) -> None:
    """Check the line against the data-parallel groups and the allocated tensors."""
    for scope, degrees in LAYOUTS.items():
        groups = ProcessGroupCollection.create(RankGrid(world_size=world, **degrees), rank=rank)
        engine, optimizer = build_engine(groups, experts=4, strategy="optim")
        line = data_parallel_line(engine, optimizer)
        assert line.startswith(f"data parallel: {scope}; "), line
        buckets = engine.store.buckets
        dp_sizes = {b.handles[0].sharding.expert: b.group.size * b.outer.size for b in buckets}
        assert dp_sizes == {False: groups["dense_dp"].size, True: groups["expert_dp"].size}
        state = sum(optimizer.state_bytes(on_host=host) for host in (False, True))
        weights = sum(bucket.data.nbytes for bucket in buckets)
        sizes = bytes_in(line)
        assert [sizes[1], sizes[3]] == pytest.approx([weights, state], abs=6e3), line


def test_data_parallel_line_names_expert_ranks_if_different():
    run_ranks(check_expert_lines, 4)


def test_data_parallel_line_names_flags_without_effect():
    groups = ProcessGroupCollection.single()
    engine, optimizer = build_engine(
        groups, strategy="optim_grads_params", overlap_grad_reduce=False
    )
    line = data_parallel_line(engine, optimizer)
    flag = "--data-parallel-sharding-strategy optim_grads_params"
    assert f"one rank, so that {flag} has nothing to do; 1 bucket of" in line
    engine.config = dataclasses.replace(
        engine.config,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        prefetch_bytes=9,
        granularity="weight",
        grad_dtype=torch.bfloat16,
        fp32_accumulation=True,
        debug=True,
    )
    assert (
        f"{flag}, --overlap-grad-reduce, --overlap-param-gather, "
        "--param-gather-prefetch-bytes 9, --param-gather-granularity weight, "
        "--reduce-scatter-with-fp32-accumulation, --check-weight-gather have nothing to do;"
    ) in data_parallel_line(engine, optimizer)
    engine.config = DataParallelConfig(overlap_grad_reduce=False)
    assert "one rank; 1 bucket of" in data_parallel_line(engine, optimizer)


def test_data_parallel_line_separates_host_and_device_state():
    sizes = {}
    for share in (0.0, 0.25, 1.0):
        engine, optimizer = build_engine(ProcessGroupCollection.single(), offload=share)
        line = data_parallel_line(engine, optimizer)
        sizes[share] = bytes_in(line)[3:]
        assert ("of optimizer state on the device and " in line) == (share > 0.0)
        count = sum(b.data.numel() for b in engine.store.buckets)
    # bf16 weights: an fp32 master and two fp32 moments each
    assert sizes[0.0] == pytest.approx([12 * count], abs=6e3)
    assert sizes[0.25] == pytest.approx([9 * count, 3 * count], abs=6e3)
    assert sizes[1.0] == pytest.approx([0, 12 * count], abs=6e3)


def test_nccl_communicators_are_counted_with_their_memory():
    handles = [object(), object()]
    members = {name: Group(name, (0, 1), 0, handles[i % 2]) for i, name in enumerate("abc")}
    groups = ProcessGroupCollection(RankGrid(world_size=2), 0, members)
    line = communicators_line(groups, torch.device("cuda", 0), {"NCCL_MAX_NCHANNELS": "8"})
    num_bytes = 3 * 8 * 2 * ((4 << 20) + 5312 * 1024)
    assert line is not None
    assert "3 of NCCL" in line
    assert f"{num_bytes / 1e6:,.2f} MB" in line
    assert communicators_line(groups, torch.device("cpu"), {}) is None
    assert communicators_line(ProcessGroupCollection.single(), torch.device("cuda", 0), {}) is None
