# SPDX-License-Identifier: Apache-2.0
"""Fill in derived options, given the number of processes.

`resolve` is idempotent, and `--print-config` prints a resolved config. Only a config for which
`check.py` lists no problem can be resolved.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from megatron.core.datasets.batch_sizes import BatchSizes, Division
from megatron.core.models.layer_pattern import MAMBA
from megatron.training.config import (
    Config,
    DataParallelOptions,
    EvaluationConfig,
    ExpertConfig,
    HybridConfig,
    LoggingConfig,
    ModelConfig,
    MuonOptions,
    OptimizerOptions,
    ParallelConfig,
    ProfilingConfig,
    ScheduleConfig,
    TokenizerConfig,
    TrainingConfig,
)
from megatron.training.config.layer_pattern_options import (
    expert_layers,
    has,
    mamba_heads,
    with_layers,
    write_frequency,
)


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """A resolved config and the sizes that follow from it.

    Args:
        config: the config with every derived field filled in.
        world_size: number of processes.
        data_parallel_size: number of data-parallel ranks.
        batch_sizes: global batch size of each step, in samples.
        evaluation: division of a validation step's samples over ranks and microbatches.
        num_microbatches: forward passes per rank and step at the final batch size, padding
            microbatches of an uneven batch included.
        train_iters: number of optimizer steps of the run.
        train_samples: number of training samples of the run.
        decay_samples: samples until the learning rate reaches its minimum.
        warmup_samples: samples of learning rate warm-up.
        wsd_decay_samples: samples of WSD's annealing phase; 0 for other decay styles.
        batch_follows_world: whether the global batch size was derived from the number of processes.
        unresolved: the config before derived fields were filled in.
    """

    config: Config
    world_size: int
    data_parallel_size: int
    batch_sizes: BatchSizes
    evaluation: Division
    num_microbatches: int
    train_iters: int
    train_samples: int
    decay_samples: int
    warmup_samples: int
    wsd_decay_samples: int
    batch_follows_world: bool = field(default=False, compare=False)
    unresolved: Config | None = field(default=None, compare=False, repr=False)

    def division(self, samples: int) -> Division:
        """Return the division of a step of `samples` samples over ranks and microbatches."""
        return Division(
            samples=samples,
            micro_batch_size=self.config.training.micro_batch_size,
            data_parallel_size=self.data_parallel_size,
        )

    @property
    def final_division(self) -> Division:
        """The division of a step at the final batch size over ranks and microbatches."""
        return self.division(self.batch_sizes.sizes[-1])


def resolve(config: Config, world_size: int) -> ResolvedRun:
    """Return the run that a config describes on `world_size` processes."""
    unresolved, config = config, with_layers(config)
    dp = world_size // config.model_parallel_size
    sizes = config.training.batch_sizes(dp)
    training = replace(config.training, global_batch_size=sizes.sizes[-1])
    evaluation = _evaluation(config.evaluation, training)
    if training.train_samples is not None:
        iterations, samples = sizes.steps(training.train_samples), training.train_samples
    else:
        assert training.train_iters is not None, "check() requires train_iters or train_samples"
        iterations, samples = training.train_iters, sizes.samples(training.train_iters)
    schedule = _schedule(config.schedule, training)
    decay_iters = schedule.lr_decay_iters or 0
    decay = schedule.lr_decay_samples or sizes.samples(decay_iters)
    if schedule.lr_warmup_fraction is not None:
        warmup = int(schedule.lr_warmup_fraction * decay)
    else:
        warmup = schedule.lr_warmup_samples or sizes.samples(schedule.lr_warmup_iters)
    anneal = decay - sizes.samples(max(decay_iters - (schedule.lr_wsd_decay_iters or 0), 0))
    size, micro_size = sizes.sizes[-1], training.micro_batch_size
    final = Division(samples=size, micro_batch_size=micro_size, data_parallel_size=dp)
    resolved = replace(
        config,
        model=_model(config, training.seq_length),
        experts=_experts(config),
        hybrid=_hybrid(config),
        parallel=_parallel(config),
        tokenizer=_tokenizer(config.tokenizer),
        data_parallel=_data_parallel(config.data_parallel, dp),
        training=training,
        evaluation=evaluation,
        optimizer=_optimizer(config.optimizer),
        muon=_muon(config),
        schedule=schedule,
        logging=_logging(config.logging, config.checkpoint.save),
        profiling=_profiling(config),
    )
    return ResolvedRun(
        config=resolved,
        world_size=world_size,
        data_parallel_size=dp,
        batch_sizes=sizes,
        evaluation=Division(
            samples=evaluation.eval_global_batch_size or sizes.sizes[-1],
            micro_batch_size=evaluation.eval_micro_batch_size or training.micro_batch_size,
            data_parallel_size=dp,
        ),
        num_microbatches=final.rounds,
        train_iters=iterations,
        train_samples=samples,
        decay_samples=decay,
        warmup_samples=warmup,
        wsd_decay_samples=schedule.lr_wsd_decay_samples
        or (anneal if schedule.lr_wsd_decay_iters else 0),
        batch_follows_world=(
            config.training.global_batch_size is None
            and config.training.step_batch_size_schedule is None
        ),
        unresolved=unresolved,
    )


def _model(config: Config, seq_length: int) -> ModelConfig:
    model, channels = config.model, None
    if model.num_attention_heads is not None and not config.attention.multi_latent_attention:
        channels = model.kv_channels or model.hidden_size // model.num_attention_heads
    grouped = model.group_query_attention and model.num_query_groups is not None
    return replace(
        model,
        ffn_hidden_size=model.inner_features,
        kv_channels=channels,
        num_query_groups=model.num_query_groups if grouped else model.num_attention_heads,
        max_position_embeddings=model.max_position_embeddings or seq_length,
    )


def _experts(config: Config) -> ExpertConfig:
    experts = config.experts
    if experts.num_experts is None:
        return experts
    layers = expert_layers(config)  # empty for a hybrid, whose pattern names expert layers
    return replace(
        experts,
        moe_layer_freq=experts.moe_layer_freq or (write_frequency(layers) if layers else None),
        moe_ffn_hidden_size=experts.moe_ffn_hidden_size or config.model.inner_features,
    )


def _hybrid(config: Config) -> HybridConfig:
    hybrid = config.hybrid
    if not has(config, MAMBA):
        return hybrid
    return replace(
        hybrid,
        mamba_num_heads=mamba_heads(config),
        mamba_norm_groups=hybrid.mamba_norm_groups or hybrid.mamba_num_groups,
    )


def _parallel(config: Config) -> ParallelConfig:
    parallel = config.parallel
    tp, etp = parallel.tensor_model_parallel_size, parallel.expert_tensor_parallel_size
    expert_shards = parallel.expert_tensor_parallel_num_weight_shards
    if config.experts.num_experts is not None:
        etp = etp or tp
        expert_shards = expert_shards or etp
    return replace(
        parallel,
        sequence_parallel=parallel.sequence_parallel and tp > 1,
        tensor_parallel_num_weight_shards=parallel.tensor_parallel_num_weight_shards or tp,
        expert_tensor_parallel_size=etp,
        expert_tensor_parallel_num_weight_shards=expert_shards,
    )


def _tokenizer(tokenizer: TokenizerConfig) -> TokenizerConfig:
    if tokenizer.tokenizer_type is None and tokenizer.tokenizer_model is not None:
        kinds: dict[str, Literal["sentencepiece", "tiktoken"]]
        kinds = {".model": "sentencepiece", ".tiktoken": "tiktoken"}
        end = os.path.splitext(tokenizer.tokenizer_model)[1]
        return replace(tokenizer, tokenizer_type=kinds.get(end, "hf"))
    return tokenizer


def padded_vocab_size(config: Config, vocab_size: int) -> int:
    """Return the vocabulary size with padding, a multiple of the tensor parallel size."""
    tp = config.parallel.tensor_model_parallel_size
    multiple = config.tokenizer.make_vocab_size_divisible_by * tp
    return -(-vocab_size // multiple) * multiple


def _data_parallel(chosen: DataParallelOptions, dp: int) -> DataParallelOptions:
    bucket = chosen.ddp_bucket_size
    if bucket is None and chosen.strategy != "optim_grads_params":
        bucket = max(40_000_000, 1_000_000 * dp)
    return replace(
        chosen,
        data_parallel_sharding_strategy=chosen.strategy,
        use_distributed_optimizer=chosen.strategy != "no_shard",
        ddp_bucket_size=bucket,
    )


def _evaluation(chosen: EvaluationConfig, training: TrainingConfig) -> EvaluationConfig:
    return replace(
        chosen,
        eval_iters=max(chosen.eval_iters, 0),
        eval_global_batch_size=chosen.eval_global_batch_size or training.global_batch_size,
        eval_micro_batch_size=chosen.eval_micro_batch_size or training.micro_batch_size,
    )


def _optimizer(optimizer: OptimizerOptions) -> OptimizerOptions:
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    return replace(
        optimizer,
        start_weight_decay=optimizer.weight_decay if start is None else start,
        end_weight_decay=optimizer.weight_decay if end is None else end,
    )


def _muon(config: Config) -> MuonOptions:
    if config.optimizer.optimizer != "muon":
        return config.muon
    return replace(config.muon, muon_split_matrices=config.muon.muon_split_matrices or "megatron")


def _schedule(schedule: ScheduleConfig, training: TrainingConfig) -> ScheduleConfig:
    if schedule.lr_decay_iters is not None or schedule.lr_decay_samples is not None:
        return schedule
    if training.train_samples is not None:
        return replace(schedule, lr_decay_samples=training.train_samples)
    return replace(schedule, lr_decay_iters=training.train_iters)


def _logging(logging: LoggingConfig, save: str | None) -> LoggingConfig:
    folder = save or logging.tensorboard_dir
    if logging.metrics_file is not None or folder is None:
        return logging
    return replace(logging, metrics_file=str(Path(folder) / "metrics.jsonl"))


def _profiling(config: Config) -> ProfilingConfig:
    root = config.checkpoint.save or config.logging.tensorboard_dir or "runs"
    folder = config.profiling.profile_dir or str(Path(root) / "profile")
    return replace(config.profiling, profile_dir=folder)
