# SPDX-License-Identifier: Apache-2.0
"""The options of parallelism, and of how a step is carried out.

How a run is spread over processes.

How the layers are cut into pipeline stages, and in which order the stages work.

What is cut over the data parallel ranks, and when they talk.

How a step is carried out: recomputed activations, CUDA graphs, products on a CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from megatron.training.config.values import not_negative, positive, require, require_all


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Pipeline parallelism."""

    pipeline_model_parallel_size: int = 1
    """Pipeline stages: ranks that each have a part of the layers and pass on what comes out."""
    pipeline_schedule: Literal["auto", "1f1b", "interleaved", "zb-h1"] = "auto"
    """In which order a stage works: 1f1b; interleaved, which needs several virtual stages per
    rank; zb-h1, which cuts backward in two and fills waiting with weight gradients. auto is
    interleaved with virtual stages, else 1f1b."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers of each virtual stage; a rank has as many as its layers make."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Virtual stages of each rank, the chunks of layers that it takes turns on."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = None
    """Microbatches in a row that a virtual stage works on before the rank's next one; derived: the
    number of stages."""
    decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first stage; the others share the rest evenly."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last stage; the others share the rest evenly."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer when layers are split evenly."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the head and the loss as a layer when layers are split evenly."""
    pipeline_model_parallel_layout: str | None = None
    """What each virtual stage has, in the model's order: E the embedding, t a layer, L the loss, |
    between stages, as in Et*3|(tt|)*2tL."""

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


def problems(config: PipelineConfig, cut_pattern: str | None) -> Iterator[str]:
    """List pipeline options that cannot be combined, each with its fix.

    Args:
        cut_pattern: the layer pattern if it says where stages begin, else None.
    """
    pattern_flags = [] if cut_pattern is None else [f"--hybrid-layer-pattern {cut_pattern}"]
    if config.pipeline_model_parallel_size == 1:
        idle = config.non_default_flags(*(field.name for field in dataclasses.fields(config)))
        for flag in idle + pattern_flags:
            yield f"{flag} has no effect without --pipeline-model-parallel-size above 1: raise that"
        return
    ways = config.non_default_flags("pipeline_model_parallel_layout") + pattern_flags
    if len(ways) > 1:
        yield f"{' and '.join(ways)} exclude each other: keep one"
    for flag in config.non_default_flags(*_VIRTUAL, *_UNEVEN) if ways else ():
        yield f"{flag} has no effect with {ways[0]}, which says where each layer is: drop one"
    if len(virtual := config.non_default_flags(*_VIRTUAL)) > 1:
        yield f"{' and '.join(virtual)} exclude each other: keep one"


#: What `Backend.gtp_opt_in_modules` takes.
GTP_OPT_IN_MODULES = ("mla_down_proj", "position_embeddings")

ShardingStrategy: TypeAlias = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]


@dataclass(frozen=True, kw_only=True)
class DataParallelOptions:
    """Data parallelism."""

    use_distributed_optimizer: bool = False
    """Cut optimizer state over the data parallel ranks; means --data-parallel-sharding-strategy
    optim where none is given."""
    data_parallel_sharding_strategy: ShardingStrategy | None = None
    """What is cut over the data parallel ranks: nothing, optimizer state, also gradients, also
    weights; derived: no_shard, or optim with --use-distributed-optimizer."""
    num_distributed_optimizer_instances: int = 1
    """Hybrid sharding: cut over the ranks of one instance, repeat over so many instances."""
    outer_dp_sharding_strategy: Literal["no_shard", "optim"] = "no_shard"
    """What is cut once more over the instances: nothing, or with optim_grads_params the optimizer
    state."""
    overlap_grad_reduce: bool = False
    """Reduce gradient buckets while the backward pass still runs."""
    overlap_param_gather: bool = False
    """Gather weights just before they are needed, while the ones before them are computed with."""
    fsdp_all_gather_in_start_param_sync: bool = True
    """With --overlap-param-gather, start the first gathers at the end of the optimizer step; off,
    nothing is gathered before the next forward pass."""
    param_gather_prefetch_bytes: int = 0
    """With --overlap-param-gather or weights sharded over gtp, bytes of weights that are gathered
    ahead beyond the next unit, or matrix."""
    param_gather_granularity: Literal["unit", "weight"] = "unit"
    """What is gathered at a time with optim_grads_params: a layer, or one weight matrix after the
    other, which takes less memory and more messages."""
    grad_reduce_in_bf16: bool = False
    """With --bf16, keep and reduce gradients in bf16 instead of fp32."""
    reduce_scatter_with_fp32_accumulation: bool = False
    """With --grad-reduce-in-bf16, send gradients in bf16 and sum them in fp32."""
    gtp_reduce_scatter_per: Literal["microbatch", "step"] = "microbatch"
    """With --tensor-parallel-num-weight-shards, how often a matrix's gradient is reduce-scattered
    over gtp: in every microbatch, or once a step, for which each rank keeps it whole."""
    weight_gather_format: Literal["bf16", "fp8", "mxfp8", "nvfp4"] = "bf16"
    """With --tensor-parallel-num-weight-shards, the format in which matrices are gathered over gtp:
    bf16 is their own dtype; fp8 has one scale a matrix, mxfp8 one per 32 x 32 elements, nvfp4 one
    per 16 x 16. They are stored as without; TransformerEngine's layers whose recipe has the same
    format multiply by them as they are gathered, all others take them back first."""
    weight_gather_scale_blocks: Literal["2d", "1d"] = "2d"
    """With --weight-gather-format mxfp8 or nvfp4, the blocks that share a scale: 2d is squares, so
    that forward and backward compute with the same values; 1d is runs of 32 (16) elements along the
    dimension that a product sums over, rows in forward and columns in backward."""
    use_nccl_ub: bool = False
    """With optim_grads, optim_grads_params or weights sharded over gtp, on GPUs: lease the buffers
    that weights are gathered to and gradients reduced in from memory that NCCL has registered, so
    that its kernels copy less and take fewer multiprocessors."""
    check_weight_gather: bool = False
    """Search for faults of gathering: fill buffers that nobody holds with NaN, and compare what
    the ranks gather."""
    ddp_bucket_size: int | None = None
    """Elements per gradient bucket; derived: 40,000,000 or 1,000,000 per data parallel rank,
    whichever is more; none with optim_grads_params, where a bucket is a layer."""

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
        """The strategy, given or derived."""
        if self.data_parallel_sharding_strategy is not None:
            return self.data_parallel_sharding_strategy
        return "optim" if self.use_distributed_optimizer else "no_shard"


def data_parallel_problems(
    config: DataParallelOptions,
    *,
    data_parallel_size: int,
    bf16: bool,
    context_size: int = 1,
    over_gtp: bool = False,
) -> Iterator[str]:
    """Name what does not go together, each with its fix; `over_gtp` is whether generalized tensor
    parallelism shards weights."""
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
            "leases no buffers: drop it, choose optim_grads or optim_grads_params, or add "
            "--tensor-parallel-num-weight-shards"
        )
    if config.param_gather_granularity != "unit" and strategy != "optim_grads_params":
        yield (
            f"--param-gather-granularity {config.param_gather_granularity} has no effect with "
            f"--data-parallel-sharding-strategy {strategy}, which cuts no weight: drop it or "
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
    """Name why gradients of weights over gtp cannot be reduced once a step."""
    flag, strategy = f"--gtp-reduce-scatter-per {config.gtp_reduce_scatter_per}", config.strategy
    if config.gtp_reduce_scatter_per == "microbatch":
        return
    if strategy in ("optim_grads", "optim_grads_params"):
        yield (
            f"{flag} keeps whole gradients, which --data-parallel-sharding-strategy {strategy} "
            "shards: drop it or choose no_shard or optim"
        )
    if not over_gtp:
        yield f"{flag} has no effect without --tensor-parallel-num-weight-shards: drop it"


def _gather_format(config: DataParallelOptions, over_gtp: bool) -> Iterator[str]:
    """Name why weights cannot be gathered in another format."""
    flag = f"--weight-gather-format {config.weight_gather_format}"
    has_blocks = config.weight_gather_format in ("mxfp8", "nvfp4")
    if config.weight_gather_scale_blocks != "2d" and not has_blocks:
        yield (
            f"--weight-gather-scale-blocks {config.weight_gather_scale_blocks} has no effect with "
            f"{flag}, whose scales are not of blocks: drop it or choose mxfp8 or nvfp4"
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
    """Name what is wrong with hybrid sharding on `size` data parallel ranks, each of so many
    context parallel ones, over which an instance cuts as well."""
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
                "nothing is cut: lower it"
            )
        if strategy == "no_shard":
            yield (
                f"{flag} has no effect with --data-parallel-sharding-strategy no_shard: drop it or "
                "choose what an instance cuts"
            )
    if config.outer_dp_sharding_strategy == "optim":
        outer = "--outer-dp-sharding-strategy optim"
        if instances == 1:
            yield f"{outer} needs --num-distributed-optimizer-instances above 1: raise that"
        if strategy != "optim_grads_params":
            yield (
                f"{outer} with --data-parallel-sharding-strategy {strategy} is the same as one "
                "instance: drop both options of instances, or choose optim_grads_params"
            )


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
    keep_recurrent_states: bool = False
    """On a GPU, keep the states between chunks of recurrent blocks (G, M) from forward to backward
    instead of computing them again: one sweep over the sequence less, for the bytes that the log
    states. A CPU always keeps them."""
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


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the run is spread over processes."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each weight matrix."""
    tensor_parallel_num_weight_shards: int | None = None
    """Generalized tensor parallelism: shards of each weight matrix, a multiple of the tensor
    parallel size; each tensor parallel rank's part is sharded over that many times fewer ranks,
    which have different samples, and gathered just before use; derived: the tensor parallel
    size."""
    gtp_opt_in_modules: tuple[str, ...] | None = None
    """With --tensor-parallel-num-weight-shards, modules whose matrices are sharded too, though
    every tensor parallel rank has them whole: mla_down_proj (the down projections of latent
    attention), position_embeddings (learned absolute positions)."""
    sequence_parallel: bool = False
    """Also cut activations outside of matrix products along the sequence over the tensor parallel
    ranks."""
    context_parallel_size: int = 1
    """Ranks that share the tokens of each sample; attention alone needs those of the others."""
    cp_comm_type: Literal["auto", "p2p", "all_gather", "a2a"] = "auto"
    """How attention meets the tokens of other ranks: by p2p keys and values go round; all_gather
    has those of all ranks at once; a2a cuts heads instead of tokens; auto takes what moves
    least."""
    context_parallel_cut: Literal["auto", "row", "documents"] = "auto"
    """How rows that hold several documents are cut over context parallel ranks: row cuts each as
    one, documents spreads every document evenly over all ranks, with padding; auto takes for each
    microbatch what costs the slowest rank less."""
    linear_cp_mode: Literal["auto", "headwise", "segments"] = "auto"
    """How a recurrence meets the tokens of other ranks: headwise cuts heads instead of tokens;
    segments passes states from each part of a document to the next; auto takes what moves least."""
    expert_model_parallel_size: int = 1
    """Ranks that share the experts of a layer, each with some of them."""
    expert_tensor_parallel_size: int | None = None
    """Ranks that share the weight matrices of each expert; derived: the tensor parallel size."""
    expert_tensor_parallel_num_weight_shards: int | None = None
    """The same shards for each matrix of an expert, a multiple of the expert tensor parallel size;
    derived: that size."""
    moe_token_dispatcher_type: Literal["auto", "allgather", "alltoall"] = "auto"
    """How tokens come to the ranks of their experts: allgather brings all tokens to all ranks,
    alltoall to each what it needs; auto takes what moves fewer bytes."""
    moe_expert_rank_capacity_factor: float | None = None
    """In training a rank of experts takes this times its even share of tokens, and a step in which
    one gets more is an error before weights change; the host then reads no counts, and steps can be
    recorded. None takes all."""
    moe_shared_expert_overlap: bool = True
    """Compute the shared expert while tokens are on their way."""
    distributed_timeout_minutes: float = 10.0
    """How long a collective may wait for a peer before the run stops, in minutes."""
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """Whose linear layers, norms and attention a model has: local is this package's own,
    transformer_engine is TransformerEngine's, of the extra te. Weights, checkpoints and initial
    values are the same."""
    attention_backend: Literal["auto", "reference", "triton"] = "auto"
    """Which kernel computes attention; auto is TransformerEngine's with --transformer-impl
    transformer_engine, on a GPU cuDNN's or FlashAttention-2's for 16-bit attention without sinks
    and dropout (packed documents not under --cuda-graph-impl), else triton where it covers the
    case, else reference."""

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
        """Ranks over which generalized tensor parallelism shards a rank's part of a matrix."""
        tp = self.tensor_model_parallel_size
        return (self.tensor_parallel_num_weight_shards or tp) // tp

    @property
    def asks_for_gtp(self) -> bool:
        """Whether there are to be more shards than tensor parallel ranks, if only of experts, and
        be it a number that cannot be."""
        tp = self.tensor_model_parallel_size
        etp = self.expert_tensor_parallel_size or tp
        experts = self.expert_tensor_parallel_num_weight_shards or etp
        return (self.tensor_parallel_num_weight_shards or tp) > tp or experts > etp

    @property
    def expert_gtp_size(self) -> int:
        """The same of a rank's part of an expert's matrix."""
        etp = self.expert_tensor_parallel_size or self.tensor_model_parallel_size
        return (self.expert_tensor_parallel_num_weight_shards or etp) // etp
