# SPDX-License-Identifier: Apache-2.0
"""The typed schema of a run: every option is one field of one frozen dataclass here.

The command line (`flags.py`), the YAML files and the documentation are made from these classes. A
field `num_layers` is the flag `--num-layers` and the YAML key `num-layers`; names are Megatron's.
A field without a default is required, `None` means "off" or "derived by `resolve`". Nothing edits
a config: `resolve.py` returns a new one, `check.py` lists what is wrong between fields, and each
class checks its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


def _require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def _positive(section: object, *names: str) -> None:
    """Raise ValueError for the first named field that is set and not above zero."""
    for name in names:
        value = vars(section)[name]
        flag = name.replace("_", "-")
        _require(value is None or value > 0, f"--{flag} is {value}: it must be above 0")


def _not_negative(section: object, *names: str) -> None:
    """Raise ValueError for the first named field that is set and below zero."""
    for name in names:
        value = vars(section)[name]
        flag = name.replace("_", "-")
        _require(value is None or value >= 0, f"--{flag} is {value}: it must not be negative")


def _fraction(section: object, *names: str) -> None:
    """Raise ValueError for the first named field outside [0, 1)."""
    for name in names:
        value = vars(section)[name]
        flag = name.replace("_", "-")
        _require(0.0 <= value < 1.0, f"--{flag} is {value}: it must lie in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the transformer."""

    num_layers: int
    """Number of transformer layers; a layer is one attention and one MLP block."""
    hidden_size: int
    """Width of the residual stream, in features."""
    num_attention_heads: int
    """Number of query heads."""
    ffn_hidden_size: int | None = None
    """Inner width of the MLP, in features; derived: 4 x hidden, with --swiglu 8/3 x hidden rounded
    down to a multiple of 64."""
    group_query_attention: bool = False
    """Let several query heads share one key and value head; needs --num-query-groups."""
    num_query_groups: int | None = None
    """Number of key and value heads with --group-query-attention (1 = multi-query attention)."""
    kv_channels: int | None = None
    """Features per attention head; derived: hidden size / heads."""
    max_position_embeddings: int | None = None
    """Longest sequence the model is meant for, in tokens; derived: the sequence length."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Which normalisation every block and the final norm use."""
    norm_epsilon: float = 1e-5
    """Added to the variance inside every norm."""
    swiglu: bool = False
    """Use a gated MLP, silu(gate) * up, instead of GELU."""
    qk_layernorm: bool = False
    """Normalise each query and key head before the rotary embedding."""
    disable_bias_linear: bool = False
    """Leave the bias out of every linear layer."""
    add_qkv_bias: bool = False
    """Keep a bias on the query, key and value projection even with --disable-bias-linear."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output head a weight of its own instead of the embedding's."""
    attention_dropout: float = 0.1
    """Dropout rate of attention probabilities."""
    hidden_dropout: float = 0.1
    """Dropout rate of the embedding and of every block's output."""
    init_method_std: float = 0.02
    """Standard deviation of initial weights; output projections use it / sqrt(2 x layers)."""

    def __post_init__(self) -> None:
        _positive(self, "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size")
        _positive(self, "num_query_groups", "kv_channels", "max_position_embeddings")
        _positive(self, "norm_epsilon", "init_method_std")
        _fraction(self, "attention_dropout", "hidden_dropout")


@dataclass(frozen=True, kw_only=True)
class PositionConfig:
    """Rotary position embedding."""

    position_embedding_type: Literal["rope", "none"] = "rope"
    """How positions enter attention."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies."""
    rotary_percent: float = 1.0
    """Share of each head's features that is rotated, in (0, 1]."""
    rotary_seq_len_interpolation_factor: float | None = None
    """Divide positions by this number (linear scaling)."""
    use_rope_scaling: bool = False
    """Scale the low rotary frequencies as Llama 3.1 does."""
    rope_scaling_factor: float = 8.0
    """Factor of --use-rope-scaling."""
    rope_scaling_original_max_position: int = 8192
    """Context length, in tokens, the frequencies were first trained at (--use-rope-scaling)."""

    def __post_init__(self) -> None:
        _positive(self, "rotary_base", "rotary_seq_len_interpolation_factor")
        _positive(self, "rope_scaling_factor", "rope_scaling_original_max_position")
        _require(
            0.0 < self.rotary_percent <= 1.0,
            f"--rotary-percent is {self.rotary_percent}: it must lie in (0, 1]",
        )


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Tokenizer and vocabulary."""

    tokenizer_type: Literal["hf", "byte", "null"] | None = None
    """Kind of tokenizer; derived: hf when --tokenizer-model is given."""
    tokenizer_model: str | None = None
    """Path of a Hugging Face tokenizer.json."""
    vocab_size: int | None = None
    """Size of the vocabulary, in tokens, before padding; derived: the tokenizer's."""
    make_vocab_size_divisible_by: int = 128
    """Pad the vocabulary to a multiple of this times the tensor parallel size; padding takes no
    part in the maths."""

    def __post_init__(self) -> None:
        _positive(self, "vocab_size", "make_vocab_size_divisible_by")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the run is spread over processes."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each weight matrix."""
    sequence_parallel: bool = False
    """Also cut activations outside of matrix products along the sequence over the tensor parallel
    ranks."""
    use_distributed_optimizer: bool = False
    """Cut optimizer state over the data parallel ranks (the same as
    --data-parallel-sharding-strategy optim)."""
    data_parallel_sharding_strategy: Literal["no_shard", "optim"] | None = None
    """What is cut over the data parallel ranks; derived: no_shard, or optim with
    --use-distributed-optimizer."""
    overlap_grad_reduce: bool = False
    """Reduce gradient buckets while the backward pass still runs."""
    ddp_bucket_size: int | None = None
    """Elements per gradient bucket; derived: 40,000,000 or 1,000,000 per data parallel rank,
    whichever is more."""
    distributed_timeout_minutes: float = 10.0
    """How long a collective may wait for a peer before the run stops, in minutes."""
    transformer_impl: Literal["local"] = "local"
    """Which backend builds the layers."""

    def __post_init__(self) -> None:
        _positive(self, "tensor_model_parallel_size", "ddp_bucket_size")
        _positive(self, "distributed_timeout_minutes")
        _require(
            not (
                self.use_distributed_optimizer
                and self.data_parallel_sharding_strategy == "no_shard"
            ),
            "--use-distributed-optimizer contradicts --data-parallel-sharding-strategy "
            "no_shard: keep one",
        )


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Batch, length of the run and numbers format."""

    seq_length: int
    """Tokens per sample."""
    micro_batch_size: int
    """Samples per rank in one forward pass."""
    global_batch_size: int | None = None
    """Samples per optimizer step over all ranks; derived: micro batch x data parallel size."""
    train_iters: int | None = None
    """Number of optimizer steps; give this or --train-samples."""
    train_samples: int | None = None
    """Number of samples to train on; give this or --train-iters."""
    exit_interval: int | None = None
    """Save and stop when the iteration is a multiple of this."""
    seed: int = 1234
    """Seed of initial weights, dropout and data order."""
    bf16: bool = False
    """Weights and activations in bfloat16, with fp32 master weights and gradients."""
    fp16: bool = False
    """Weights and activations in float16, with fp32 master weights, gradients and loss scaling."""
    calculate_per_token_loss: bool = False
    """Weight every token of the global batch alike, instead of every microbatch."""
    deterministic_mode: bool = False
    """Refuse operations whose result may differ between two equal runs."""
    device: Literal["auto", "cpu"] = "auto"
    """Where to run; auto takes a GPU when there is one."""
    eval_interval: int = 1000
    """Iterations between validations; 0 = never."""
    eval_iters: int = 100
    """Global batches per validation."""
    max_consecutive_bad_steps: int = 10
    """Stop after this many steps in a row with a NaN or Inf loss or gradient norm; each is
    skipped."""

    def __post_init__(self) -> None:
        _positive(self, "seq_length", "micro_batch_size", "global_batch_size", "train_iters")
        _positive(self, "train_samples", "exit_interval", "max_consecutive_bad_steps")
        _not_negative(self, "eval_interval", "eval_iters", "seed")
        _require(not (self.bf16 and self.fp16), "--bf16 and --fp16 exclude each other: keep one")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """adam is AdamW (decoupled weight decay)."""
    weight_decay: float = 0.01
    """Weight decay; biases and norms have none."""
    start_weight_decay: float | None = None
    """Weight decay at the first step, for a ramp; derived: --weight-decay."""
    end_weight_decay: float | None = None
    """Weight decay at the end of the ramp; derived: --weight-decay."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay goes from start to end over the run."""
    adam_beta1: float = 0.9
    """Decay of Adam's first moment."""
    adam_beta2: float = 0.999
    """Decay of Adam's second moment."""
    adam_eps: float = 1e-8
    """Added to the root of Adam's second moment."""
    sgd_momentum: float = 0.9
    """Momentum of --optimizer sgd."""
    clip_grad: float = 1.0
    """Largest L2 norm of the gradient; 0 = no clipping."""

    def __post_init__(self) -> None:
        _not_negative(self, "weight_decay", "start_weight_decay", "end_weight_decay", "clip_grad")
        _positive(self, "adam_eps")
        _fraction(self, "adam_beta1", "adam_beta2", "sgd_momentum")


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Loss scaling of --fp16."""

    loss_scale: float | None = None
    """Constant loss scale; None = dynamic."""
    initial_loss_scale: float = 2.0**32
    """First dynamic loss scale."""
    min_loss_scale: float = 1.0
    """Smallest dynamic loss scale."""
    loss_scale_window: int = 1000
    """Good steps in a row before the scale doubles."""
    hysteresis: int = 2
    """Overflows before the scale is halved."""

    def __post_init__(self) -> None:
        _positive(self, "loss_scale", "initial_loss_scale", "min_loss_scale")
        _positive(self, "loss_scale_window", "hysteresis")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate schedule, counted in samples."""

    lr: float
    """Highest learning rate."""
    min_lr: float = 0.0
    """Lowest learning rate."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """How the learning rate falls after warm-up."""
    lr_decay_iters: int | None = None
    """Iterations until the learning rate reaches its minimum; derived: --train-iters."""
    lr_decay_samples: int | None = None
    """Samples until the learning rate reaches its minimum; derived: --train-samples."""
    lr_warmup_iters: int = 0
    """Iterations of linear warm-up."""
    lr_warmup_samples: int = 0
    """Samples of linear warm-up."""
    lr_warmup_fraction: float | None = None
    """Linear warm-up as a share of the decay length."""
    lr_warmup_init: float = 0.0
    """Learning rate at the start of warm-up."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """How the learning rate falls in the last phase of WSD."""
    lr_wsd_decay_iters: int | None = None
    """Iterations of the last phase of WSD."""
    lr_wsd_decay_samples: int | None = None
    """Samples of the last phase of WSD."""

    def __post_init__(self) -> None:
        _positive(self, "lr", "lr_decay_iters", "lr_decay_samples")
        _positive(self, "lr_wsd_decay_iters", "lr_wsd_decay_samples")
        _not_negative(self, "min_lr", "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_init")
        _require(
            self.lr_warmup_fraction is None or 0.0 <= self.lr_warmup_fraction < 1.0,
            f"--lr-warmup-fraction is {self.lr_warmup_fraction}: it must lie in [0, 1)",
        )
        _require(
            self.min_lr <= self.lr,
            f"--min-lr {self.min_lr} is above --lr {self.lr}: lower --min-lr",
        )
        _require(
            self.lr_warmup_init <= self.lr,
            f"--lr-warmup-init {self.lr_warmup_init} is above --lr {self.lr}: lower it",
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training data."""

    data_path: tuple[str, ...]
    """Prefixes of .bin/.idx pairs: PREFIX, or WEIGHT PREFIX WEIGHT PREFIX ... for a blend."""
    split: str = "969,30,1"
    """Shares of documents for training, validation and test."""
    data_cache_path: str | None = None
    """Folder of sample index caches; None = keep them in memory."""
    dataloader_type: Literal["single", "cyclic"] = "single"
    """single reads samples in order; cyclic permutes them anew in every epoch."""
    eod_mask_loss: bool = False
    """Leave end-of-document tokens out of the loss."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints."""

    save: str | None = None
    """Folder to save checkpoints in; None = save none."""
    load: str | None = None
    """Folder to load the latest checkpoint from, or one iter_ folder; an empty or absent root
    starts anew."""
    save_interval: int | None = None
    """Iterations between saves; None = only at the end."""
    load_optim: bool = True
    """Load optimizer state and schedule too (--no-load-optim: weights and data position only)."""
    finetune: bool = False
    """Load weights only and start again at iteration 0 with the first sample."""

    def __post_init__(self) -> None:
        _positive(self, "save_interval")
        _require(
            self.save_interval is None or self.save is not None,
            "--save-interval needs --save: name a folder to save in",
        )


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What a run prints and records."""

    log_interval: int = 100
    """Iterations between log lines."""
    log_throughput: bool = False
    """Show TFLOP/s per device in the log line, and the share of its peak where that is known."""
    log_num_zeros_in_grad: bool = False
    """Show how many gradient elements are exactly zero."""
    log_params_norm: bool = False
    """Show the L2 norm of all weights."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard scalars."""
    metrics_file: str | None = None
    """File for one JSON line per logged step; derived: metrics.jsonl in --save, else in
    --tensorboard-dir."""
    progress: Literal["auto", "plain", "live"] = "auto"
    """Live progress bar or plain lines; auto is live on a terminal."""

    def __post_init__(self) -> None:
        _positive(self, "log_interval")


@dataclass(frozen=True, kw_only=True)
class Config:
    """One training run."""

    model: ModelConfig
    position: PositionConfig
    tokenizer: TokenizerConfig
    parallel: ParallelConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    loss_scale: LossScaleConfig
    schedule: ScheduleConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
