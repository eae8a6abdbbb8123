# SPDX-License-Identifier: Apache-2.0
"""Options of data parallelism: every invalid combination is reported, every valid one accepted."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from megatron.core import RankGrid
from megatron.training.config.check import check
from megatron.training.config.resolve import resolve
from megatron.training.core_configs import data_parallel_config
from megatron.training.distributed_context import rank_grid
from tests.unit_tests.training.small_config import small_config

STRATEGY = "--data-parallel-sharding-strategy"
INSTANCES = "--num-distributed-optimizer-instances"
GTP, ONCE = "--tensor-parallel-num-weight-shards", "--gtp-reduce-scatter-per"
CUT = f"{STRATEGY} optim_grads_params"


@pytest.mark.parametrize(
    ("flags", "world", "message"),
    [
        (
            f"{CUT} {INSTANCES} 3",
            4,
            "3 does not divide the data parallel size of 4: use 2, or drop it",
        ),
        (f"{CUT} {INSTANCES} 2", 1, "does not divide the data parallel size of 1: drop it"),
        (f"{CUT} --ddp-bucket-size 9", 2, "--ddp-bucket-size 9 has no effect .* layer: drop it"),
        (
            f"{CUT} {INSTANCES} 2 --tensor-model-parallel-size 2",
            4,
            "2 leaves each instance one of the 2 data parallel ranks",
        ),
        (f"{INSTANCES} 2", 4, "2 has no effect with --data-parallel-sharding-strategy no_shard"),
        (f"{CUT} --outer-dp-sharding-strategy optim", 4, "needs .*instances above 1"),
        (
            f"{STRATEGY} optim_grads {INSTANCES} 2 --outer-dp-sharding-strategy optim",
            4,
            "optim with --data-parallel-sharding-strategy optim_grads is the same as one instance",
        ),
        ("--overlap-param-gather", 2, "--overlap-param-gather has no effect with .* no_shard"),
        ("--check-weight-gather", 2, "--check-weight-gather has no effect with .* no_shard"),
        (
            f"{STRATEGY} optim --param-gather-granularity weight",
            2,
            "granularity weight has no effect with --data-parallel-sharding-strategy optim, which",
        ),
        (f"{CUT} --param-gather-prefetch-bytes 1", 2, "without --overlap-param-gather: add that"),
        (f"{ONCE} step", 2, "step has no effect without --tensor-parallel-num-weight-shards"),
        (
            f"{ONCE} step {GTP} 2 {STRATEGY} optim_grads",
            2,
            "step needs unsharded gradients, which --data-parallel-sharding-strategy optim_grads",
        ),
        (
            f"{CUT} {GTP} 2 --param-gather-prefetch-bytes 1",
            2,
            "without --overlap-param-gather: add that",
        ),
        ("--grad-reduce-in-bf16", 2, "--grad-reduce-in-bf16 needs --bf16"),
        (
            f"{CUT} --bf16 --reduce-scatter-with-fp32-accumulation",
            2,
            "accumulation needs --grad-reduce-in-bf16",
        ),
        (
            "--bf16 --grad-reduce-in-bf16 --reduce-scatter-with-fp32-accumulation",
            2,
            "needs gradients that are reduce-scattered: choose",
        ),
    ],
)
def test_each_problem_is_reported_once(flags, world, message):
    problems = check(small_config(flags), world)
    assert len(problems) == 1, problems
    with pytest.raises(ValueError, match=message):
        raise ValueError(problems[0])


def test_gather_options_over_gtp_work_with_every_strategy():
    over_gtp = f"{GTP} 2 --check-weight-gather --param-gather-prefetch-bytes 64 {ONCE} step"
    for strategy in ("no_shard", "optim"):
        run = resolve(small_config(f"{over_gtp} {STRATEGY} {strategy}"), 2)
        assert check(run.config, 2) == []
        config = data_parallel_config(run.config)
        assert (config.debug, config.prefetch_bytes) == (True, 64)
        assert config.gtp_reduce_scatter_per == "step"


def test_all_problems_are_reported_together():
    flags = f"{INSTANCES} 3 --outer-dp-sharding-strategy optim --overlap-param-gather "
    flags += "--reduce-scatter-with-fp32-accumulation"
    flags += " --optimizer-cpu-offload --optimizer muon --exp-avg-sq-dtype bf16 --log-straggler "
    flags += "--straggler-factor 1"
    problems = check(small_config(flags), 4)
    assert len(problems) == 9, problems


def test_contradictions_within_a_section_are_refused():
    for flags, message in (
        (f"--use-distributed-optimizer {STRATEGY} no_shard", "contradicts"),
        (f"{INSTANCES} 0", "must be above 0"),
        ("--param-gather-prefetch-bytes -1", "must not be negative"),
    ):
        with pytest.raises(ValueError, match=message):
            small_config(flags)


def test_core_accepts_every_combination_without_problems():
    num_valid, plain = 0, small_config("--bf16")
    for (
        strategy,
        outer,
        instances,
        gather,
        bf16_reduce,
        fp32_accumulation,
        prefetch_bytes,
    ) in itertools.product(
        ("no_shard", "optim", "optim_grads", "optim_grads_params"),
        ("no_shard", "optim"),
        (1, 2),
        (False, True),
        (False, True),
        (False, True),
        (0, 64),
    ):
        chosen = dataclasses.replace(
            plain.data_parallel,
            data_parallel_sharding_strategy=strategy,
            num_distributed_optimizer_instances=instances,
            outer_dp_sharding_strategy=outer,
            overlap_param_gather=gather,
            param_gather_prefetch_bytes=prefetch_bytes,
            grad_reduce_in_bf16=bf16_reduce,
            reduce_scatter_with_fp32_accumulation=fp32_accumulation,
        )
        config = dataclasses.replace(plain, data_parallel=chosen)
        problems = check(config, 4)
        run = resolve(config, 4)
        if problems:
            continue
        num_valid += 1
        data_parallel_config(run.config)
        assert rank_grid(run) == RankGrid(world_size=4, instances=instances)
        assert resolve(run.config, 4) == run
        assert check(run.config, 4) == []
    # no_shard has 2 valid combinations. optim and optim_grads allow 2 settings of instances,
    # optim_grads_params 3; each combines with 3 settings of gathering and 3 of gradients.
    assert num_valid == 2 + (2 + 2 + 3) * 3 * 3


def test_distributed_optimizer_works_with_all_sharded_strategies():
    assert resolve(
        small_config("--use-distributed-optimizer"), 2
    ).config.data_parallel.strategy == ("optim")
    chosen = resolve(small_config(f"--use-distributed-optimizer {CUT}"), 2).config.data_parallel
    assert (chosen.strategy, chosen.use_distributed_optimizer) == ("optim_grads_params", True)
    assert not resolve(small_config(), 2).config.data_parallel.use_distributed_optimizer


def test_nccl_user_buffers_need_sharded_gradients():
    problems = check(small_config(f"--use-nccl-ub {STRATEGY} optim"), 4)
    assert len(problems) == 1
    assert "--use-nccl-ub" in problems[0]
    assert "optim_grads" in problems[0]
    for strategy in (f"{STRATEGY} optim_grads", f"{STRATEGY} optim_grads_params"):
        config = small_config(f"--use-nccl-ub {strategy}")
        assert check(config, 4) == []
        assert data_parallel_config(resolve(config, 4).config).use_nccl_ub
