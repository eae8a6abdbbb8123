# SPDX-License-Identifier: Apache-2.0
"""Options of data parallelism: every invalid combination is reported, every valid one accepted."""

from __future__ import annotations

import dataclasses
import itertools

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


def test_gather_options_over_gtp_work_with_every_strategy():
    over_gtp = f"{GTP} 2 --check-weight-gather --param-gather-prefetch-bytes 64 {ONCE} step"
    for strategy in ("no_shard", "optim"):
        run = resolve(small_config(f"{over_gtp} {STRATEGY} {strategy}"), 2)
        assert check(run.config, 2) == []
        config = data_parallel_config(run.config)
        assert (config.debug, config.prefetch_bytes) == (True, 64)
        assert config.gtp_reduce_scatter_per == "step"


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
