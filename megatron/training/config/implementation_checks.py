# SPDX-License-Identifier: Apache-2.0
"""Checks of the implementations: TransformerEngine, attention kernels and CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.core.extensions import transformer_engine_problem
from megatron.training.config.layer_pattern_options import has_attention, is_recurrent

if TYPE_CHECKING:
    from megatron.training.config import Config


def transformer_engine_problems(config: Config) -> Iterator[str]:
    """Yield a message with a fix for each option that TransformerEngine does not support."""
    if config.parallel.transformer_impl != "transformer_engine":
        return
    flag = "--transformer-impl transformer_engine"
    chosen = config.execution
    if chosen.cuda_graph_impl != "none":
        yield f"{flag} cannot be captured by --cuda-graph-impl {chosen.cuda_graph_impl}: drop one"


def machine_problems(config: Config) -> Iterator[str]:
    """Yield a message with a fix for each requirement that this machine does not meet."""
    if config.parallel.transformer_impl == "transformer_engine":
        problem = transformer_engine_problem()
        if problem is not None:
            flag = "--transformer-impl transformer_engine"
            yield f"{flag}: {problem}, or take --transformer-impl local"


def attention_kernel_problems(config: Config) -> Iterator[str]:
    """Yield a message if the attention kernel does not support the model."""
    dropout = config.attention.attention_dropout
    attends = has_attention(config)
    if attends and config.parallel.attention_backend == "triton" and dropout:
        yield (
            f"--attention-backend triton does not support --attention-dropout {dropout}: set that "
            "to 0 or "
            "use auto"
        )


DOCUMENTS = "--reset-attention-mask"


def cuda_graph_problems(config: Config) -> Iterator[str]:
    """Yield a message with a fix for each option that CUDA graphs cannot be combined with."""
    chosen = config.execution
    if chosen.cuda_graph_impl == "none":
        return
    flag = f"--cuda-graph-impl {chosen.cuda_graph_impl}"
    cp = config.parallel.context_parallel_size
    packed = config.data.sft or config.data.reset_attention_mask
    if config.training.device == "cpu":
        yield f"{flag} needs a GPU: drop it or --device cpu"
    size = config.pipeline.pipeline_model_parallel_size
    for conflicting, on, reason in (
        (
            f"--pipeline-model-parallel-size {size}",
            size > 1,
            "sends and receives between stages, which a graph cannot capture",
        ),
        (
            f"--context-parallel-size {cp} with {'--sft' if config.data.sft else DOCUMENTS}",
            cp > 1 and packed,
            "attends block by block at document boundaries, with other blocks in every step",
        ),
        (
            f"recurrent blocks with {'--sft' if config.data.sft else DOCUMENTS}",
            is_recurrent(config) and packed,
            "process sequences of other lengths in every step",
        ),
        (
            "--step-batch-size-schedule",
            config.training.step_batch_size_schedule is not None,
            "changes the number of microbatches, and the graph has a fixed number",
        ),
        (
            "--rampup-batch-size",
            config.training.rampup_batch_size is not None,
            "changes the number of microbatches, and the graph has a fixed number",
        ),
        (
            "--check-weight-gather",
            config.data_parallel.check_weight_gather,
            "compares the order of gathers on the host in every step",
        ),
        (
            "--check-collectives",
            config.failures.check_collectives,
            "does not see the collectives of a replayed step",
        ),
        (
            "--log-straggler",
            config.failures.log_straggler,
            "does not see how long a replayed step waits",
        ),
    ):
        if on:
            yield f"{conflicting} {reason}: drop it or {flag}"
    steps, iterations = chosen.cuda_graph_warmup_steps, config.training.train_iters
    if iterations is not None and steps >= iterations:
        yield (
            f"--cuda-graph-warmup-steps {steps} is not below --train-iters {iterations}, so that "
            "no graph is captured: lower it"
        )
