# SPDX-License-Identifier: Apache-2.0
"""How a step is carried out: recomputed activations, CUDA graphs, products on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.training.config.values import positive, require_all


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """Activation recompute (losses and gradients keep every bit), CUDA graphs, CPU products."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """full keeps the inputs of layers alone and computes them twice; selective computes again what
    is cheap: norms and MLP activations."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With full: uniform cuts all layers into runs of --recompute-num-layers and keeps the inputs
    of each run; block does so for each of the first --recompute-num-layers layers."""
    recompute_num_layers: int | None = None
    """Layers of --recompute-method, in each chunk of layers of a pipeline stage by itself; an
    attention or recurrent block and what follows it are a layer."""
    cuda_graph_impl: Literal["none", "full_iteration"] = "none"
    """full_iteration records forward and backward of all microbatches of a step as one CUDA graph
    and replays it; nothing is gathered between steps then (as with
    --no-fsdp-all-gather-in-start-param-sync)."""
    cuda_graph_warmup_steps: int = 3
    """Steps that run without a graph before one is recorded."""
    cpu_matmul_dtype: Literal["auto", "weights", "fp32"] = "auto"
    """What a CPU multiplies matrices in with --bf16 or --fp16: the dtype of the weights, or fp32;
    auto is what the first rank measures to be faster (fp32 with --fp16). A resumed run keeps every
    bit only with the same choice, and says so where it is another."""

    def __post_init__(self) -> None:
        require_all(
            lambda: positive(self, "recompute_num_layers"),
            lambda: positive(self, "cuda_graph_warmup_steps"),
        )
