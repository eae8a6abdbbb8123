# SPDX-License-Identifier: Apache-2.0
"""Check combinations of options before any process group exists.

The checks are pure functions of the config and the number of processes; they read no file. Each is
beside the options that it concerns: checks within a help group in its module, checks across groups
in a module of the feature.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from megatron.training.config import (
    Config,
    block_checks,
    expert_checks,
    failure_options,
    implementation_checks,
    layer_pattern_options,
    logging_options,
    optimizer_options,
    parallel_checks,
    quantization,
    stages,
    training_options,
    unused_options,
)
from megatron.training.config.data_options import vocabulary_problems
from megatron.training.config.execution_options import recompute_problems
from megatron.training.config.model_options import rope_scaling_problems


def check(config: Config, world_size: int) -> list[str]:
    """Return a message with a fix for each problem of a config on `world_size` processes."""
    config = layer_pattern_options.with_layers(config)
    return list(
        itertools.chain(
            parallel_checks.layout_problems(config, world_size),
            parallel_checks.context_problems(config),
            implementation_checks.transformer_engine_problems(config),
            quantization.problems(config),
            _batch(config, world_size),
            parallel_checks.data_parallel_problems(config, world_size),
            layer_pattern_options.problems(config),
            unused_options.missing_block_problems(config),
            block_checks.recurrent_problems(config),
            block_checks.head_problems(config),
            block_checks.inner_feature_problems(config),
            block_checks.latent_attention_problems(config),
            expert_checks.expert_problems(config, world_size),
            rope_scaling_problems(config.position),
            block_checks.learned_position_problems(config),
            implementation_checks.attention_kernel_problems(config),
            _recompute(config),
            stages.problems(config, world_size),
            implementation_checks.cuda_graph_problems(config),
            _run(config, world_size),
        )
    )


def _batch(config: Config, world_size: int) -> Iterator[str]:
    dp_size, remainder = divmod(world_size, config.model_parallel_size)
    if remainder:
        return  # `parallel_checks` reports it
    yield from training_options.batch_problems(
        config.training,
        config.evaluation,
        dp_size=dp_size,
        has_experts=config.experts.num_experts is not None,
    )


def _recompute(config: Config) -> Iterator[str]:
    num_layers = layer_pattern_options.num_layers(config)
    yield from recompute_problems(config.execution, num_layers=num_layers)


def _run(config: Config, world_size: int) -> Iterator[str]:
    """Yield the problems of the options that do not concern the model and its layout."""
    training = config.training
    yield from training_options.length_problems(
        training,
        max_position_embeddings=config.model.max_position_embeddings,
        dp_size=max(1, world_size // config.model_parallel_size),
    )
    yield from optimizer_options.schedule_problems(config.schedule, training)
    yield from optimizer_options.weight_decay_problems(config.optimizer)
    yield from optimizer_options.optimizer_problems(config.optimizer)
    yield from vocabulary_problems(config.tokenizer)
    yield from failure_options.failure_problems(
        config.failures,
        checkpoint=config.checkpoint,
        max_consecutive_bad_steps=training.max_consecutive_bad_steps,
    )
    yield from unused_options.missing_switch_problems(config)
    yield from logging_options.profiling_problems(
        config.profiling, train_iters=training.train_iters, world_size=world_size
    )
