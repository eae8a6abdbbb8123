# SPDX-License-Identifier: Apache-2.0
"""Options of model, pipeline and data parallelism and of the implementation of layers, with checks.

`check.py` checks sizes against the number of processes, `stages.py` the layers of each stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from megatron.training.config.values import not_negative, positive, require, require_all

#: Module names that `Backend.gtp_opt_in_modules` accepts.
GTP_OPT_IN_MODULES = ("mla_down_proj", "position_embeddings")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Model parallelism, and the implementation of its layers."""

    tensor_model_parallel_size: int = 1
    """Degree of tensor model parallelism: ranks that share each weight matrix."""
    tensor_parallel_num_weight_shards: int | None = None
    """Generalized tensor parallelism: number of shards of each weight matrix, a multiple of the
    tensor parallel size. Each tensor-parallel slice is sharded further over ranks with different
    samples and gathered just before use; derived: the tensor parallel size."""
    gtp_opt_in_modules: tuple[str, ...] | None = None
    """With --tensor-parallel-num-weight-shards, additional modules to shard that are replicated
    over tensor-parallel ranks: mla_down_proj (down projections of latent attention),
    position_embeddings (learned absolute positions)."""
    sequence_parallel: bool = False
    """Shard activations along the sequence dimension over the tensor-parallel group (sequence
    parallelism)."""
    context_parallel_size: int = 1
    """Degree of context parallelism: ranks that share the tokens of each sample."""
    cp_comm_type: Literal["auto", "p2p", "all_gather", "a2a"] = "auto"
    """How attention exchanges data over context-parallel ranks: p2p sends keys and values around a
    ring; all_gather gathers them from all ranks; a2a redistributes heads instead of tokens; auto
    chooses the one that communicates least."""
    context_parallel_cut: Literal["auto", "row", "documents"] = "auto"
    """How rows of several documents are divided over context-parallel ranks: row divides the row as
    one sequence, documents divides every document evenly over all ranks, with padding; auto picks
    for each microbatch the division whose slowest rank is faster."""
    linear_cp_mode: Literal["auto", "headwise", "segments"] = "auto"
    """How recurrent mixers exchange data over context-parallel ranks: headwise redistributes heads
    instead of tokens; segments passes states from each segment of a document to the next; auto
    chooses the one that communicates least."""
    expert_model_parallel_size: int = 1
    """Degree of expert parallelism: ranks over which the experts of a layer are distributed."""
    expert_tensor_parallel_size: int | None = None
    """Degree of tensor parallelism within each expert; derived: the tensor parallel size."""
    expert_tensor_parallel_num_weight_shards: int | None = None
    """Generalized tensor parallelism of experts: number of shards of each expert matrix, a multiple
    of the expert tensor parallel size; derived: the expert tensor parallel size."""
    moe_token_dispatcher_type: Literal["auto", "allgather", "alltoall"] = "auto"
    """How tokens reach the ranks of their experts: allgather sends all tokens to all ranks,
    alltoall sends each rank only the tokens it needs; auto chooses the one that moves fewer
    bytes."""
    moe_expert_rank_capacity_factor: float | None = None
    """In training, buffers of an expert-parallel rank hold this times its even share of tokens; a
    step that exceeds it is an error before weights change. The host then never reads token counts,
    so that steps can be captured in CUDA graphs. None = no limit."""
    moe_shared_expert_overlap: bool = True
    """Overlap the shared expert's computation with the token dispatch."""
    distributed_timeout_minutes: float = 10.0
    """Timeout of collectives, in minutes."""
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """Implementation of linear layers, norms and attention: local is this package's,
    transformer_engine is TransformerEngine's (extra te). Weights, checkpoints and initial values
    are the same."""
    attention_backend: Literal["auto", "reference", "triton"] = "auto"
    """Attention kernel. auto is TransformerEngine's with --transformer-impl transformer_engine;
    otherwise, on a GPU, cuDNN's or FlashAttention-2's for 16-bit attention without sinks and
    dropout (packed documents not under --cuda-graph-impl), else triton if it supports the case,
    else reference."""

    def __post_init__(self) -> None:
        positive(self, "tensor_model_parallel_size", "context_parallel_size")
        positive(self, "expert_model_parallel_size", "expert_tensor_parallel_size")
        positive(self, "moe_expert_rank_capacity_factor")
        positive(
            self, "tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards"
        )
        positive(self, "distributed_timeout_minutes")
        unknown = [name for name in self.gtp_opt_in_modules or () if name not in GTP_OPT_IN_MODULES]
        require(
            not unknown,
            f"--gtp-opt-in-modules {' '.join(unknown)}: use {' or '.join(GTP_OPT_IN_MODULES)}",
        )

    @property
    def gtp_size(self) -> int:
        """Ranks over which generalized tensor parallelism shards a tensor-parallel slice of a
        matrix."""
        tp = self.tensor_model_parallel_size
        return (self.tensor_parallel_num_weight_shards or tp) // tp

    @property
    def requests_gtp(self) -> bool:
        """Whether the options request more shards than tensor-parallel ranks, for experts or other
        weights; the number may still be invalid."""
        tp = self.tensor_model_parallel_size
        etp = self.expert_tensor_parallel_size or tp
        experts = self.expert_tensor_parallel_num_weight_shards or etp
        return (self.tensor_parallel_num_weight_shards or tp) > tp or experts > etp

    @property
    def expert_gtp_size(self) -> int:
        """Ranks over which a tensor-parallel slice of an expert's matrix is sharded."""
        etp = self.expert_tensor_parallel_size or self.tensor_model_parallel_size
        return (self.expert_tensor_parallel_num_weight_shards or etp) // etp


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Pipeline parallelism."""

    pipeline_model_parallel_size: int = 1
    """Number of pipeline stages, each of which holds a contiguous part of the layers."""
    pipeline_schedule: Literal["auto", "1f1b", "interleaved", "zb-h1"] = "auto"
    """Pipeline schedule: 1f1b; interleaved, which needs several virtual stages per rank; zb-h1,
    which splits the backward pass and fills pipeline bubbles with weight gradients. auto is
    interleaved with virtual stages, else 1f1b."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers per virtual pipeline stage; the number of virtual stages follows from it."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Virtual stages (model chunks) per pipeline rank."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = None
    """Consecutive microbatches that a virtual stage processes before the rank turns to its next
    one; derived: the number of stages."""
    decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first pipeline stage; the remaining layers are divided evenly."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last pipeline stage; the remaining layers are divided evenly."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer when dividing layers evenly."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the output head and the loss as a layer when dividing layers evenly."""
    pipeline_model_parallel_layout: str | None = None
    """Explicit contents of each virtual stage, in the model's order: E embedding, t layer, L loss,
    | between stages, as in Et*3|(tt|)*2tL."""

    def __post_init__(self) -> None:
        require_all(
            lambda: positive(
                self,
                "pipeline_model_parallel_size",
                "num_layers_per_virtual_pipeline_stage",
                "num_virtual_stages_per_pipeline_rank",
                "microbatch_group_size_per_virtual_pipeline_stage",
            ),
            lambda: not_negative(
                self, "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
            ),
        )

    def non_default_flags(self, *names: str) -> list[str]:
        """Return the named options whose value is not the default, as flags with values."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        values = {name: vars(self)[name] for name in names}
        return [
            f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
            for name, value in values.items()
            if value != defaults[name]
        ]


_VIRTUAL = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")

_UNEVEN = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def pipeline_problems(config: PipelineConfig, cut_pattern: str | None) -> Iterator[str]:
    """List pipeline options that cannot be combined, each with its fix.

    Args:
        cut_pattern: the layer pattern if it contains stage boundaries, else None.
    """
    pattern_flags = [] if cut_pattern is None else [f"--hybrid-layer-pattern {cut_pattern}"]
    if config.pipeline_model_parallel_size == 1:
        idle = config.non_default_flags(*(field.name for field in dataclasses.fields(config)))
        for flag in idle + pattern_flags:
            yield f"{flag} has no effect without --pipeline-model-parallel-size above 1: raise that"
        return
    ways = config.non_default_flags("pipeline_model_parallel_layout") + pattern_flags
    if len(ways) > 1:
        yield f"{' and '.join(ways)} are mutually exclusive: keep one"
    for flag in config.non_default_flags(*_VIRTUAL, *_UNEVEN) if ways else ():
        yield f"{flag} has no effect with {ways[0]}, which places every layer: drop one"
    if len(virtual := config.non_default_flags(*_VIRTUAL)) > 1:
        yield f"{' and '.join(virtual)} are mutually exclusive: keep one"


ShardingStrategy: TypeAlias = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]


@dataclass(frozen=True, kw_only=True)
class DataParallelOptions:
    """Data parallelism."""

    use_distributed_optimizer: bool = False
    """Shard optimizer state over data-parallel ranks; without --data-parallel-sharding-strategy
    this means optim."""
    data_parallel_sharding_strategy: ShardingStrategy | None = None
    """What is sharded over data-parallel ranks: nothing, optimizer state, optimizer state and
    gradients, or weights as well; derived: no_shard, or optim with --use-distributed-optimizer."""
    num_distributed_optimizer_instances: int = 1
    """Hybrid sharding: number of replicas, within each of which state is sharded."""
    outer_dp_sharding_strategy: Literal["no_shard", "optim"] = "no_shard"
    """What is additionally sharded over the instances: nothing, or with optim_grads_params the
    optimizer state."""
    overlap_grad_reduce: bool = False
    """Overlap the gradient reduction with the backward pass."""
    overlap_param_gather: bool = False
    """Overlap the all-gather of weights with the computation of preceding layers."""
    fsdp_all_gather_in_start_param_sync: bool = True
    """With --overlap-param-gather, start the first all-gathers at the end of the optimizer step;
    off, they start with the next forward pass."""
    param_gather_prefetch_bytes: int = 0
    """With --overlap-param-gather or weights sharded over gtp, bytes of weights to prefetch beyond
    the next unit or matrix."""
    param_gather_granularity: Literal["unit", "weight"] = "unit"
    """What is gathered at a time with optim_grads_params: a layer, or one weight matrix after the
    other, which takes less memory and more messages."""
    grad_reduce_in_bf16: bool = False
    """With --bf16, accumulate and reduce gradients in bf16 instead of fp32."""
    reduce_scatter_with_fp32_accumulation: bool = False
    """With --grad-reduce-in-bf16, communicate gradients in bf16 and sum them in fp32."""
    gtp_reduce_scatter_per: Literal["microbatch", "step"] = "microbatch"
    """With --tensor-parallel-num-weight-shards, how often the gradient of a matrix is
    reduce-scattered over gtp: in every microbatch, or once per step, for which each rank keeps it
    unsharded."""
    weight_gather_format: Literal["bf16", "fp8", "mxfp8", "nvfp4"] = "bf16"
    """With --tensor-parallel-num-weight-shards, the format in which matrices are gathered over gtp:
    bf16 is the dtype of the weights; fp8 has one scale per matrix, mxfp8 one per 32 x 32 elements,
    nvfp4 one per 16 x 16. Storage does not change. TransformerEngine layers whose recipe has the
    same format use the gathered values directly; all others dequantize them first."""
    weight_gather_scale_blocks: Literal["2d", "1d"] = "2d"
    """With --weight-gather-format mxfp8 or nvfp4, the blocks that share a scale: 2d blocks are
    squares, so that forward and backward use the same values; 1d blocks are 32 (16) consecutive
    elements along the dimension of the reduction, rows in forward and columns in backward."""
    use_nccl_ub: bool = False
    """With optim_grads, optim_grads_params or weights sharded over gtp, on GPUs: allocate
    all-gather and reduce-scatter buffers in memory registered with NCCL, so that its kernels copy
    less and use fewer SMs."""
    check_weight_gather: bool = False
    """Debug the weight gathering: fill free buffers with NaN, and compare the gathered weights
    between ranks."""
    ddp_bucket_size: int | None = None
    """Elements per gradient bucket; derived: 40,000,000 or 1,000,000 per data-parallel rank,
    whichever is more; not used with optim_grads_params, where a bucket is a layer."""

    def __post_init__(self) -> None:
        contradiction = self.data_parallel_sharding_strategy == "no_shard"
        require_all(
            lambda: positive(self, "num_distributed_optimizer_instances", "ddp_bucket_size"),
            lambda: not_negative(self, "param_gather_prefetch_bytes"),
            lambda: require(
                not (self.use_distributed_optimizer and contradiction),
                "--use-distributed-optimizer contradicts --data-parallel-sharding-strategy "
                "no_shard: keep one",
            ),
        )

    @property
    def strategy(self) -> ShardingStrategy:
        """The sharding strategy, explicit or derived."""
        if self.data_parallel_sharding_strategy is not None:
            return self.data_parallel_sharding_strategy
        return "optim" if self.use_distributed_optimizer else "no_shard"


def sharding_problems(
    config: DataParallelOptions,
    *,
    data_parallel_size: int,
    bf16: bool,
    context_size: int = 1,
    over_gtp: bool = False,
) -> Iterator[str]:
    """Yield a message for each combination of options that cannot work, with its fix.

    Args:
        data_parallel_size: number of data-parallel ranks.
        bf16: whether weights are bf16.
        context_size: number of context-parallel ranks.
        over_gtp: whether generalized tensor parallelism shards weights.
    """
    yield from _instances(config, data_parallel_size, context_size)
    strategy = config.strategy
    if strategy == "optim_grads_params" and config.ddp_bucket_size is not None:
        yield (
            f"--ddp-bucket-size {config.ddp_bucket_size} has no effect with "
            "--data-parallel-sharding-strategy optim_grads_params, where a bucket is a layer: drop "
            "it"
        )
    if strategy == "no_shard":
        for flag, on in (
            ("--overlap-param-gather", config.overlap_param_gather),
            ("--check-weight-gather", config.check_weight_gather and not over_gtp),
        ):
            if on:
                yield (
                    f"{flag} has no effect with --data-parallel-sharding-strategy no_shard, where "
                    "no weight is gathered: drop it or choose optim"
                )
    if config.use_nccl_ub and strategy in ("no_shard", "optim") and not over_gtp:
        yield (
            f"--use-nccl-ub has no effect with --data-parallel-sharding-strategy {strategy}, which "
            "has no communication buffers: drop it, choose optim_grads or optim_grads_params, or "
            "add "
            "--tensor-parallel-num-weight-shards"
        )
    if config.param_gather_granularity != "unit" and strategy != "optim_grads_params":
        yield (
            f"--param-gather-granularity {config.param_gather_granularity} has no effect with "
            f"--data-parallel-sharding-strategy {strategy}, which shards no weight: drop it or "
            "choose optim_grads_params"
        )
    yield from _gtp_reduce_scatter(config, over_gtp)
    yield from _gather_format(config, over_gtp)
    ahead = config.overlap_param_gather or (over_gtp and strategy != "optim_grads_params")
    if config.param_gather_prefetch_bytes and not ahead:
        yield (
            f"--param-gather-prefetch-bytes {config.param_gather_prefetch_bytes} has no effect "
            "without --overlap-param-gather: add that"
        )
    if config.grad_reduce_in_bf16 and not bf16:
        yield "--grad-reduce-in-bf16 needs --bf16: gradients are not kept narrower than weights"
    if config.reduce_scatter_with_fp32_accumulation:
        name = "--reduce-scatter-with-fp32-accumulation"
        if not config.grad_reduce_in_bf16:
            yield f"{name} needs --grad-reduce-in-bf16: sums of fp32 gradients are fp32 already"
        if strategy == "no_shard":
            yield (
                f"{name} needs gradients that are reduce-scattered: choose "
                "--data-parallel-sharding-strategy optim"
            )


def _gtp_reduce_scatter(config: DataParallelOptions, over_gtp: bool) -> Iterator[str]:
    """Yield a message if gradients of weights sharded over gtp cannot be reduced once per step."""
    flag, strategy = f"--gtp-reduce-scatter-per {config.gtp_reduce_scatter_per}", config.strategy
    if config.gtp_reduce_scatter_per == "microbatch":
        return
    if strategy in ("optim_grads", "optim_grads_params"):
        yield (
            f"{flag} needs unsharded gradients, which --data-parallel-sharding-strategy {strategy} "
            "shards: drop it or choose no_shard or optim"
        )
    if not over_gtp:
        yield f"{flag} has no effect without --tensor-parallel-num-weight-shards: drop it"


def _gather_format(config: DataParallelOptions, over_gtp: bool) -> Iterator[str]:
    """Yield a message if weights cannot be gathered in the chosen format."""
    flag = f"--weight-gather-format {config.weight_gather_format}"
    has_blocks = config.weight_gather_format in ("mxfp8", "nvfp4")
    if config.weight_gather_scale_blocks != "2d" and not has_blocks:
        yield (
            f"--weight-gather-scale-blocks {config.weight_gather_scale_blocks} has no effect with "
            f"{flag}, whose scales do not belong to blocks: drop it or choose mxfp8 or nvfp4"
        )
    if config.weight_gather_format == "bf16":
        return
    if not over_gtp:
        yield f"{flag} has no effect without --tensor-parallel-num-weight-shards: drop it"
    elif config.strategy == "optim_grads_params":
        yield (
            f"{flag} has no effect with --data-parallel-sharding-strategy optim_grads_params, "
            "which gathers layers: drop it or choose no_shard, optim or optim_grads"
        )


def _instances(config: DataParallelOptions, size: int, context_size: int) -> Iterator[str]:
    """Yield a message for each problem of hybrid sharding.

    Args:
        size: number of data-parallel ranks.
        context_size: number of context-parallel ranks per data-parallel rank; an instance shards
            over them too.
    """
    instances, strategy = config.num_distributed_optimizer_instances, config.strategy
    flag = f"--num-distributed-optimizer-instances {instances}"
    if instances > 1:
        if size % instances:
            fitting = [str(n) for n in range(2, size) if size % n == 0]
            fix = f"use {' or '.join(fitting)}, or drop it" if fitting else "drop it"
            yield f"{flag} does not divide the data parallel size of {size}: {fix}"
        elif size == instances and context_size == 1:
            yield (
                f"{flag} leaves each instance one of the {size} data parallel ranks, so that "
                "nothing is sharded: lower it"
            )
        if strategy == "no_shard":
            yield (
                f"{flag} has no effect with --data-parallel-sharding-strategy no_shard: drop it or "
                "choose what an instance shards"
            )
    if config.outer_dp_sharding_strategy == "optim":
        outer = "--outer-dp-sharding-strategy optim"
        if instances == 1:
            yield f"{outer} needs --num-distributed-optimizer-instances above 1: raise that"
        if strategy != "optim_grads_params":
            yield (
                f"{outer} with --data-parallel-sharding-strategy {strategy} is the same as one "
                "instance: drop both instance options, or choose optim_grads_params"
            )
