# SPDX-License-Identifier: Apache-2.0
"""Recording the work of a step on a GPU once and replaying it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.training.config.layer_pattern import is_recurrent

if TYPE_CHECKING:
    from megatron.training.config import Config


DOCUMENTS = "--reset-attention-mask"


def problems(config: Config) -> Iterator[str]:
    """Name what does not go together with recorded steps, each with its mend."""
    chosen = config.execution
    if chosen.cuda_graph_impl == "none":
        return
    flag = f"--cuda-graph-impl {chosen.cuda_graph_impl}"
    cp = config.parallel.context_parallel_size
    packed = config.data.sft or config.data.reset_attention_mask
    if config.training.device == "cpu":
        yield f"{flag} needs a GPU: drop it or --device cpu"
    size = config.pipeline.pipeline_model_parallel_size
    for other, on, reason in (
        (
            f"--pipeline-model-parallel-size {size}",
            size > 1,
            "sends and receives between stages, which is not recorded",
        ),
        (
            f"--context-parallel-size {cp} with {'--sft' if config.data.sft else DOCUMENTS}",
            cp > 1 and packed,
            "attends block by block where documents meet, other blocks in every step",
        ),
        (
            f"recurrent blocks with {'--sft' if config.data.sft else DOCUMENTS}",
            is_recurrent(config) and packed,
            "work on sequences of other lengths in every step",
        ),
        (
            "--check-weight-gather",
            config.data_parallel.check_weight_gather,
            "compares orders on the host in every step",
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
            yield f"{other} {reason}: drop it or {flag}"
    steps, iterations = chosen.cuda_graph_warmup_steps, config.training.train_iters
    if iterations is not None and steps >= iterations:
        yield (
            f"--cuda-graph-warmup-steps {steps} is not below --train-iters {iterations}, so that "
            "nothing is recorded: lower it"
        )
