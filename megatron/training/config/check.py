# SPDX-License-Identifier: Apache-2.0
"""Check combinations of options before any process group exists.

The checks are pure functions of the config and the number of processes; they read no file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from megatron.core.datasets.batch_sizes import Division
from megatron.training.config import (
    Config,
    data_parallel_options,
    layer_pattern_options,
    optimizer_options,
    quantization,
    stages,
    unused_options,
)


def check(config: Config, world_size: int) -> list[str]:
    """Return a message with a fix for each problem of a config on `world_size` processes."""
    config = layer_pattern_options.with_layers(config)
    return list(
        itertools.chain(
            _layout(config, world_size),
            unused_options.context_problems(config),
            unused_options.transformer_engine_problems(config),
            quantization.problems(config),
            _batch(config, world_size),
            _data_parallel(config, world_size),
            layer_pattern_options.problems(config),
            unused_options.missing_block_problems(config),
            unused_options.hybrid_problems(config),
            _heads(config),
            _inner_features(config),
            unused_options.attention_problems(config),
            unused_options.expert_problems(config, world_size),
            _rope_scaling(config),
            _learned_positions(config),
            _kernels(config),
            _recompute(config),
            stages.problems(config, world_size),
            unused_options.cuda_graph_problems(config),
            _length(config, world_size),
            _schedule(config),
            _weight_decay(config),
            optimizer_options.optimizer_problems(config.optimizer),
            _vocabulary(config),
            _failures(config, world_size),
            unused_options.missing_switches(config),
            unused_options.profiling_problems(config, world_size),
        )
    )


def _layout(config: Config, world_size: int) -> Iterator[str]:
    parallel = config.parallel
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    pp, ranks_per_replica = config.pipeline.pipeline_model_parallel_size, config.model_parallel_size
    sizes = {
        "--tensor-model-parallel-size": tp,
        "--context-parallel-size": cp,
        "--pipeline-model-parallel-size": pp,
    }
    non_trivial_sizes = [f"{flag} {size}" for flag, size in sizes.items() if size > 1]
    if world_size % ranks_per_replica:
        product = " x ".join(non_trivial_sizes) + (
            f" = {ranks_per_replica}" if len(non_trivial_sizes) > 1 else ""
        )
        yield (
            f"{product} does not divide the world of {world_size} processes: start a multiple of "
            f"{ranks_per_replica} processes or lower it"
        )
    yield from _weight_shards(config, world_size)
    yield from _expert_blocks(config)
    if config.parallel.sequence_parallel and tp > 1 and config.training.seq_length % (tp * cp):
        product = " x ".join(flag for flag in non_trivial_sizes if "pipeline" not in flag)
        yield (
            f"--seq-length {config.training.seq_length} is not a multiple of {product}, which "
            "--sequence-parallel needs: change one"
        )


def _weight_shards(config: Config, world_size: int) -> Iterator[str]:
    """Yield a message for each problem of generalized tensor parallelism."""
    parallel, tp = config.parallel, config.parallel.tensor_model_parallel_size
    shards, dp = (
        parallel.tensor_parallel_num_weight_shards,
        world_size // config.model_parallel_size,
    )
    flag = f"--tensor-parallel-num-weight-shards {shards}"
    if shards is not None and shards % tp:
        yield (
            f"{flag} is not a multiple of --tensor-model-parallel-size {tp}: it counts the shards "
            f"over tp and gtp, use {-(-shards // tp) * tp}, for example"
        )
    elif world_size % config.model_parallel_size == 0 and dp % parallel.gtp_size:
        yield (
            f"{flag} over tensor parallel size {tp} needs {parallel.gtp_size} data parallel ranks, "
            f"or a multiple: there are {dp}"
        )
    latent = config.attention.multi_latent_attention
    learned = config.position.position_embedding_type == "learned_absolute"
    for name, used, needs in (
        ("mla_down_proj", latent, "--multi-latent-attention"),
        ("position_embeddings", learned, "--position-embedding-type learned_absolute"),
    ):
        if name in (parallel.gtp_opt_in_modules or ()) and not (used and parallel.gtp_size > 1):
            needs = needs if parallel.gtp_size > 1 else "--tensor-parallel-num-weight-shards"
            yield f"--gtp-opt-in-modules {name} has no effect without {needs}: drop it"
    instances = config.data_parallel.num_distributed_optimizer_instances
    if instances > 1:
        for size, name in (
            (parallel.gtp_size, "--tensor-parallel-num-weight-shards"),
            (parallel.expert_gtp_size, "--expert-tensor-parallel-num-weight-shards"),
        ):
            if size > 1:
                yield (
                    f"{name} with --num-distributed-optimizer-instances {instances}: weights are "
                    "sharded over gtp or over the ranks of an instance: drop one"
                )


def _expert_blocks(config: Config) -> Iterator[str]:
    """Yield a message if blocks that share a scale would span two experts' matrices."""
    gather_format, experts = config.data_parallel.weight_gather_format, config.experts
    block = {"mxfp8": 32, "nvfp4": 16}.get(gather_format)
    if block is None or experts.num_experts is None or config.parallel.expert_gtp_size == 1:
        return
    if config.data_parallel.strategy == "optim_grads_params":
        return  # `data_parallel_options` reports that the format has no effect
    etp = config.parallel.expert_tensor_parallel_size or config.parallel.tensor_model_parallel_size
    width = experts.moe_ffn_hidden_size or config.model.inner_features
    for rows, name in (
        (width // etp, "--moe-ffn-hidden-size"),
        (config.model.hidden_size, "--hidden-size"),
    ):
        if rows % block:
            yield (
                f"--weight-gather-format {gather_format} has blocks of {block} rows, and a rank "
                f"has {rows} of {name} in each expert's matrix, so that some would hold rows of "
                "two experts: use fp8 or bf16, or another size"
            )


def _batch(config: Config, world_size: int) -> Iterator[str]:
    training = config.training
    if world_size % config.model_parallel_size:
        return
    dp_size = world_size // config.model_parallel_size
    flag, sizes = "--global-batch-size", training.batch_sizes(dp_size).sizes
    if training.step_batch_size_schedule is not None:
        flag = "--step-batch-size-schedule"
    elif training.rampup_batch_size is not None:
        flag = "--rampup-batch-size"
    micro, micro_flag = training.micro_batch_size, "--micro-batch-size"
    for size in dict.fromkeys(sizes):
        yield from _division(config, dp_size, batch=(flag, size), micro=(micro_flag, micro))
    evaluation = config.evaluation
    size, eval_micro_batch = evaluation.eval_global_batch_size, evaluation.eval_micro_batch_size
    if (size, eval_micro_batch) != (None, None):
        flag = flag if size is None else "--eval-global-batch-size"
        micro_flag = micro_flag if eval_micro_batch is None else "--eval-micro-batch-size"
        batch, micro_with_flag = (flag, size or sizes[-1]), (micro_flag, eval_micro_batch or micro)
        if (batch[1], micro_with_flag[1]) != (sizes[-1], micro):
            yield from _division(config, dp_size, batch=batch, micro=micro_with_flag)


def _division(
    config: Config, dp_size: int, *, batch: tuple[str, int], micro: tuple[str, int]
) -> Iterator[str]:
    """Yield a message for each problem of a batch size, given with its flag, and of its division
    into microbatches."""
    (flag, size), (micro_flag, rows) = batch, micro
    division = Division(samples=size, micro_batch_size=rows, data_parallel_size=dp_size)
    uneven = config.training.allow_uneven_batch
    if not (division.is_even or uneven):
        suggested_size = max(1, round(size / (rows * dp_size))) * rows * dp_size
        yield (
            f"{flag} {size} is not a multiple of {micro_flag} {rows} x data parallel size "
            f"{dp_size} = {rows * dp_size}: use {suggested_size}, for example, or "
            "--allow-uneven-batch"
        )
    if uneven and division.blocks < dp_size:
        yield (
            f"{flag} {size} is {division.blocks} microbatches of {rows}, fewer than "
            f"data parallel size {dp_size}: start fewer processes, or lower {micro_flag}"
        )
    if uneven and size % rows and config.experts.num_experts is not None:
        yield (
            f"{flag} {size} is not a multiple of {micro_flag} {rows}, which --num-experts requires "
            "even with --allow-uneven-batch: change one"
        )


def _data_parallel(config: Config, world_size: int) -> Iterator[str]:
    ranks = config.model_parallel_size
    size = world_size // ranks if world_size % ranks == 0 else 1
    yield from data_parallel_options.data_parallel_problems(
        config.data_parallel,
        data_parallel_size=size,
        bf16=config.training.bf16,
        context_size=config.parallel.context_parallel_size,
        over_gtp=config.parallel.requests_gtp,
    )


def _heads(config: Config) -> Iterator[str]:
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    heads, groups = model.num_attention_heads, model.num_query_groups
    if not layer_pattern_options.has_attention(config):
        return  # `missing_block_problems` reports attention options of a model without attention
    if heads is None:
        yield "missing --num-attention-heads: give it"
        return
    latent_heads = config.attention.multi_latent_attention
    if heads % tp and not latent_heads:
        yield (
            f"--num-attention-heads {heads} is not a multiple of --tensor-model-parallel-size "
            f"{tp}: change one"
        )
    if model.group_query_attention and groups is None:
        yield "--group-query-attention needs --num-query-groups: give it"
    if model.group_query_attention and groups is not None and groups > 0:
        if heads % groups:
            yield (
                f"--num-attention-heads {heads} is not a multiple of --num-query-groups "
                f"{groups}: change one"
            )
        if groups % tp and tp % groups:
            yield (
                f"--num-query-groups {groups} and --tensor-model-parallel-size {tp}: one must "
                "divide the other"
            )
    if latent_heads:
        channels, flag = config.attention.qk_pos_emb_head_dim, "--qk-pos-emb-head-dim"
    else:
        channels, flag = model.kv_channels or model.hidden_size // heads, "--kv-channels"
    if not latent_heads and model.kv_channels is None and model.hidden_size % heads:
        yield (
            f"--hidden-size {model.hidden_size} is not a multiple of --num-attention-heads "
            f"{heads}: change one or give --kv-channels"
        )
    rotated = int(channels * config.position.rotary_percent)
    if config.position.is_rotary and (rotated % 2 or rotated == 0):
        yield (
            f"{rotated} features per head would be rotated ({flag} {channels} x --rotary-percent "
            f"{config.position.rotary_percent}): the number must be even and above 0"
        )


def _inner_features(config: Config) -> Iterator[str]:
    ffn, tp = config.model.ffn_hidden_size, config.parallel.tensor_model_parallel_size
    if ffn is not None and ffn % tp:
        yield (
            f"--ffn-hidden-size {ffn} is not a multiple of --tensor-model-parallel-size {tp}: "
            "change one"
        )


def _rope_scaling(config: Config) -> Iterator[str]:
    position = config.position
    scalings = {
        "--use-rope-scaling": position.use_rope_scaling,
        "--rotary-seq-len-interpolation-factor": (
            position.rotary_seq_len_interpolation_factor is not None
        ),
        "--position-embedding-type yarn": position.position_embedding_type == "yarn",
    }
    chosen = [flag for flag, on in scalings.items() if on]
    if len(chosen) > 1:
        yield f"{' and '.join(chosen)} are mutually exclusive: keep one"
    low, high = position.rope_scaling_low_freq_factor, position.rope_scaling_high_freq_factor
    if low >= high:
        yield (
            f"--rope-scaling-low-freq-factor {low} must be below --rope-scaling-high-freq-factor "
            f"{high}: change one"
        )
    slow, fast = position.yarn_beta_slow, position.yarn_beta_fast
    if slow > fast:
        yield f"--yarn-beta-slow {slow} must not be above --yarn-beta-fast {fast}: change one"


def _learned_positions(config: Config) -> Iterator[str]:
    learned = config.position.position_embedding_type == "learned_absolute"
    if learned and layer_pattern_options.mtp_num_layers(config):
        yield (
            "--position-embedding-type learned_absolute cannot be combined with multi-token "
            "prediction, which embeds tokens without positions: use rope, yarn or none"
        )


def _kernels(config: Config) -> Iterator[str]:
    dropout = config.attention.attention_dropout
    attends = layer_pattern_options.has_attention(config)
    if attends and config.parallel.attention_backend == "triton" and dropout:
        yield (
            f"--attention-backend triton does not support --attention-dropout {dropout}: set that "
            "to 0 or "
            "use auto"
        )


def _recompute(config: Config) -> Iterator[str]:
    chosen, layers = config.execution, layer_pattern_options.num_layers(config)
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
    if full and count is not None and count > layers:
        yield f"--recompute-num-layers {count} is above the model's {layers} layers: lower it"


def _length(config: Config, world_size: int) -> Iterator[str]:
    training, limit = config.training, config.model.max_position_embeddings
    if (training.train_iters is None) == (training.train_samples is None):
        yield "give exactly one of --train-iters and --train-samples"
    if limit is not None and training.seq_length > limit:
        yield (
            f"--seq-length {training.seq_length} is above --max-position-embeddings {limit}: "
            "raise the latter"
        )
    dp_size = max(1, world_size // config.model_parallel_size)
    batch = training.batch_sizes(dp_size).at(0)
    if training.train_samples is not None and training.train_samples < batch:
        yield (
            f"--train-samples {training.train_samples} is less than one --global-batch-size "
            f"{batch}: raise it"
        )


def _schedule(config: Config) -> Iterator[str]:
    schedule, training = config.schedule, config.training
    by_samples = training.train_samples is not None
    wrong = (
        {
            "lr_decay_iters": schedule.lr_decay_iters,
            "lr_warmup_iters": schedule.lr_warmup_iters or None,
        }
        if by_samples
        else {
            "lr_decay_samples": schedule.lr_decay_samples,
            "lr_warmup_samples": schedule.lr_warmup_samples or None,
        }
    )
    for name, value in wrong.items():
        if value is not None:
            unit = "samples" if by_samples else "iters"
            flag, instead = (
                name.replace("_", "-"),
                name.rsplit("_", 1)[0].replace("_", "-") + f"-{unit}",
            )
            yield f"--{flag} cannot be combined with --train-{unit}: use --{instead}"
    warmup_flags = [
        f"--{flag}"
        for flag, value in {
            "lr-warmup-iters": schedule.lr_warmup_iters,
            "lr-warmup-samples": schedule.lr_warmup_samples,
            "lr-warmup-fraction": schedule.lr_warmup_fraction,
        }.items()
        if value
    ]
    if len(warmup_flags) > 1:
        yield f"{' and '.join(warmup_flags)} are mutually exclusive: keep one"
    decay = (
        (schedule.lr_decay_samples or training.train_samples)
        if by_samples
        else (schedule.lr_decay_iters or training.train_iters)
    )
    warmup = schedule.lr_warmup_samples if by_samples else schedule.lr_warmup_iters
    if decay is not None and warmup >= decay and warmup > 0:
        yield f"warm-up of {warmup} is not shorter than the decay of {decay}: shorten it"
    wsd = schedule.lr_wsd_decay_samples if by_samples else schedule.lr_wsd_decay_iters
    if schedule.lr_decay_style == "WSD" and wsd is None:
        yield (
            f"--lr-decay-style WSD needs --lr-wsd-decay-{'samples' if by_samples else 'iters'}: "
            "give it"
        )
    if wsd is not None and decay is not None and wsd > decay - warmup:
        yield f"the WSD decay of {wsd} does not fit after warm-up in {decay}: shorten it"


def _vocabulary(config: Config) -> Iterator[str]:
    tokenizer = config.tokenizer
    files = {"hf": "a tokenizer.json", "sentencepiece": "a .model", "tiktoken": "a .tiktoken"}
    if tokenizer.tokenizer_type in files and tokenizer.tokenizer_model is None:
        yield (
            f"--tokenizer-type {tokenizer.tokenizer_type} needs --tokenizer-model: name "
            f"{files[tokenizer.tokenizer_type]}"
        )
    if tokenizer.merge_file is not None:
        from megatron.cli.tokenizers import merge_file_problem

        if problem := merge_file_problem(tokenizer.tokenizer_model, tokenizer.merge_file):
            yield problem
    if _tiktoken_flags(config):
        from megatron.cli.tokenizers import TiktokenOptions

        try:
            TiktokenOptions(
                pattern=tokenizer.tiktoken_pattern,
                num_special_tokens=tokenizer.tiktoken_num_special_tokens,
                special_tokens=tokenizer.tiktoken_special_tokens,
            )
        except ValueError as error:
            yield str(error)


def _tiktoken_flags(config: Config) -> list[str]:
    """Return the tiktoken flags that the user gave."""
    names = ("tiktoken_pattern", "tiktoken_num_special_tokens", "tiktoken_special_tokens")
    values = vars(config.tokenizer)
    return [f"--{name.replace('_', '-')}" for name in names if values[name] is not None]


def without_effect(config: Config, resolved: Config) -> list[str]:
    """Return a line for each group of options that have no effect in combination with the others.

    Args:
        config: the config before derived fields are filled in.
        resolved: the same config, resolved.
    """
    ineffective_flags = list(unused_options.ineffective(config))
    kind, unused = resolved.tokenizer.tokenizer_type, _tiktoken_flags(config)
    if unused and kind != "tiktoken":
        tokenizer = "no tokenizer is given" if kind is None else f"--tokenizer-type is {kind}"
        ineffective_flags.append((" ".join(unused), f"{tokenizer}, not tiktoken"))
    return [f"no effect here: {flag} ({reason})" for flag, reason in ineffective_flags]


def _weight_decay(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    plain = optimizer.weight_decay
    start = plain if optimizer.start_weight_decay is None else optimizer.start_weight_decay
    end = plain if optimizer.end_weight_decay is None else optimizer.end_weight_decay
    if optimizer.weight_decay_incr_style == "constant" and start != end:
        yield (
            f"weight decay goes from {start} to {end} but --weight-decay-incr-style is constant: "
            "use linear or cosine"
        )
    if start > end:
        yield f"--start-weight-decay {start} is above --end-weight-decay {end}: swap them"


def _failures(config: Config, world_size: int) -> Iterator[str]:
    failures, save = config.failures, config.checkpoint.save
    for flag, factor in (
        ("--loss-spike-factor", failures.loss_spike_factor),
        ("--straggler-factor", failures.straggler_factor),
    ):
        if factor is not None and factor <= 1.0:
            yield (
                f"{flag} is {factor}: it must be above 1, because half of the values exceed "
                "the median"
            )
    rollback, limit = failures.rollback_after_bad_steps, config.training.max_consecutive_bad_steps
    if rollback is not None and save is None:
        yield "--rollback-after-bad-steps needs --save: name a folder to load from"
    if rollback is not None and rollback >= limit:
        yield (
            f"--rollback-after-bad-steps {rollback} is never reached with "
            f"--max-consecutive-bad-steps {limit}: raise that"
        )
    if rollback is not None and not config.checkpoint.save_optim:
        yield (
            "--rollback-after-bad-steps restores a checkpoint with its optimizer state, but "
            "--no-save-optim saves none: drop one of the two options"
        )
    if failures.on_reproduced_fault == "restart" and save is None:
        yield "--on-reproduced-fault restart needs --save: it records the step there"
    if failures.on_reproduced_fault == "restart" and failures.rerun_mode == "disabled":
        yield (
            "--on-reproduced-fault restart needs --rerun-mode validate_results: without it no step "
            "is computed again"
        )
