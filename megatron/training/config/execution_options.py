# SPDX-License-Identifier: Apache-2.0
"""Options of execution: activation recomputation, CUDA graphs, dtypes of products, experiments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.training.config.values import not_negative, positive, require, require_all


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """Activation recomputation (bit-identical losses and gradients), CUDA graphs, CPU products."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """full stores only the inputs of layers and recomputes everything else in backward; selective
    recomputes what is cheap: norms and MLP activations."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With full: uniform divides all layers into groups of --recompute-num-layers and stores the
    input of each group; block recomputes each of the first --recompute-num-layers layers."""
    recompute_num_layers: int | None = None
    """Number of layers for --recompute-method, counted per model chunk of a pipeline stage; an
    attention or recurrent block and the block after it make a layer."""
    keep_recurrent_states: bool = False
    """On a GPU, store the chunk states of recurrent blocks (G, M) for backward instead of
    recomputing them: one pass over the sequence less, at a memory cost that the log states. A CPU
    always stores them."""
    cuda_graph_impl: Literal["none", "full_iteration"] = "none"
    """full_iteration captures forward and backward of all microbatches of a step in one CUDA graph
    and replays it; weights are not gathered between steps then (as with
    --no-fsdp-all-gather-in-start-param-sync)."""
    cuda_graph_warmup_steps: int = 3
    """Steps run without a graph before the capture."""
    cpu_matmul_dtype: Literal["auto", "weights", "fp32"] = "auto"
    """Dtype of matrix products on a CPU with --bf16 or --fp16: the dtype of the weights, or fp32;
    auto is whichever the first rank measures to be faster (fp32 with --fp16). A resumed run is
    bit-identical only with the same choice, and logs a different one."""

    def __post_init__(self) -> None:
        require_all(
            lambda: positive(self, "recompute_num_layers"),
            lambda: positive(self, "cuda_graph_warmup_steps"),
        )


def recompute_problems(chosen: ExecutionConfig, *, num_layers: int) -> Iterator[str]:
    """Yield a message for each problem of recomputation in a model of `num_layers` layers."""
    recompute_options = {
        "--recompute-method": chosen.recompute_method,
        "--recompute-num-layers": chosen.recompute_num_layers,
    }
    full = chosen.recompute_granularity == "full"
    for flag, value in recompute_options.items():
        if full and value is None:
            yield f"--recompute-granularity full needs {flag}: give it"
        if not full and value is not None:
            yield f"{flag} has no effect without --recompute-granularity full: add that"
    count = chosen.recompute_num_layers
    if full and count is not None and count > num_layers:
        yield f"--recompute-num-layers {count} is above the model's {num_layers} layers: lower it"


@dataclass(frozen=True, kw_only=True)
class QuantizationOptions:
    """FP8 and FP4 matrix products of linear layers, with --transformer-impl transformer_engine."""

    fp8_format: Literal["e4m3", "hybrid"] | None = None
    """Compute the decoder's linear layers in FP8: e4m3 for all tensors, or hybrid with output
    gradients in e5m2. Weights, gradients and optimizer state keep their dtypes."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "delayed"
    """How FP8 scales are computed: delayed from the absolute maxima (amax) of earlier steps,
    tensorwise from the current tensor's amax, blockwise per block of 128 elements, mxfp8 per 32
    elements as powers of two (Blackwell)."""
    fp8_margin: int = 0
    """With --fp8-recipe delayed, headroom above the amax: the scale is divided by 2 to this
    power."""
    fp8_amax_history_len: int = 1
    """With --fp8-recipe delayed, number of steps in the amax history."""
    fp8_amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    """With --fp8-recipe delayed, which amax of the history sets the scale: the latest or the
    largest."""
    fp4_format: Literal["e2m1"] | None = None
    """Compute the decoder's linear layers in NVFP4: FP4 with one scale per 16 elements
    (Blackwell)."""
    first_last_layers_bf16: bool = False
    """Compute the first and last layers in bf16 (the dtype of the weights) instead of FP8 or
    FP4."""
    num_layers_at_start_in_bf16: int = 1
    """With --first-last-layers-bf16, number of such layers at the start."""
    num_layers_at_end_in_bf16: int = 1
    """With --first-last-layers-bf16, number of such layers at the end."""

    def __post_init__(self) -> None:
        require_all(
            lambda: positive(self, "fp8_amax_history_len"),
            lambda: not_negative(self, "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
        )

    @property
    def flag(self) -> str | None:
        """The flag that turns FP8 or FP4 on, with its value; None if neither is on."""
        if self.fp8_format is not None:
            return f"--fp8-format {self.fp8_format}"
        return None if self.fp4_format is None else f"--fp4-format {self.fp4_format}"


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """Experiments, available only in a checkout of the repository."""

    experiment: tuple[str, ...] | None = None
    """NAME ...: enable these experiments, folders of experimental/; the README.md of each describes
    what it changes."""
    experiment_option: tuple[str, ...] | None = None
    """NAME.KEY=VALUE ...: options of the experiments in --experiment."""

    def __post_init__(self) -> None:
        names = self.experiment or ()
        for name in names:
            require(
                name.isidentifier(),
                f"--experiment {name!r} is not the name of a folder in experimental/: use one",
            )
        require(
            len(set(names)) == len(names), f"--experiment {' '.join(names)}: list each name once"
        )
        experiment_words = {word for name in names for word in self.option_arguments(name)}
        for word in self.experiment_option or ():
            require(
                word in experiment_words and "=" in word,
                f"--experiment-option {word}: use NAME.KEY=VALUE with a NAME of --experiment",
            )
        keys = [word.partition("=")[0] for word in self.experiment_option or ()]
        for key in dict.fromkeys(keys):
            require(keys.count(key) == 1, f"--experiment-option {key}: give it only once")

    def option_arguments(self, name: str) -> list[str]:
        """Return the NAME.KEY=VALUE arguments of one experiment."""
        return [word for word in self.experiment_option or () if word.startswith(f"{name}.")]
