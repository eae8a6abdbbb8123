# SPDX-License-Identifier: Apache-2.0
"""Derived options: Megatron's rules, idempotence, and explicit values stay unchanged."""

from __future__ import annotations

import pytest

from megatron.cli.flags import parse_command_line
from megatron.cli.schema import flatten, options
from megatron.cli.tokenizers import guess_type
from megatron.cli.yaml_file import write_options
from megatron.training.config import Config
from megatron.training.config.check import check
from megatron.training.config.resolve import padded_vocab_size, resolve
from tests.unit_tests.training.small_config import small_config

CASES = [
    "",
    "--swiglu --hidden-size 256 --num-attention-heads 8",
    "--group-query-attention --num-query-groups 3 --kv-channels 16",
    "--tensor-model-parallel-size 2 --global-batch-size 24 --use-distributed-optimizer",
    "--data-parallel-sharding-strategy optim --save s --lr-warmup-iters 3",
    "--tensorboard-dir t --lr-decay-iters 20 --start-weight-decay 0.0 --end-weight-decay 0.2 "
    "--weight-decay-incr-style linear",
    "--tokenizer-model t.json --vocab-size 1000 --tensor-model-parallel-size 2",
    "--num-experts 8 --disable-bias-linear --hybrid-layer-pattern *-*E "
    "--moe-expert-capacity-factor 1.5 --tensor-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1",
    "--pipeline-model-parallel-size 2 --num-layers 8 --global-batch-size 12 "
    "--pipeline-model-parallel-layout Et*3|(tt|)*2tL",
]


@pytest.mark.parametrize("flags", CASES)
def test_resolve_is_idempotent_and_keeps_explicit_values(flags):
    config = small_config(flags)
    assert check(config, 4) == []
    run = resolve(config, 4)
    assert resolve(run.config, 4) == run
    assert check(run.config, 4) == []
    before, after = flatten(config), flatten(run.config)
    for name, value in before.items():
        if value not in (None, False):
            assert after[name] == value, name


@pytest.mark.parametrize("flags", CASES)
def test_printed_config_is_read_back_unchanged(flags, tmp_path):
    run = resolve(small_config(flags), 4)
    text = write_options(flatten(run.config), options(Config))
    (tmp_path / "run.yaml").write_text(text)
    words = ["--config", str(tmp_path / "run.yaml")]
    reread = resolve(parse_command_line(Config, words, prog="p", description="d").config, 4)
    assert reread == run
    assert write_options(flatten(reread.config), options(Config)) == text


def test_model_defaults_follow_megatron():
    model = resolve(small_config(), 1).config.model
    assert (model.ffn_hidden_size, model.kv_channels, model.num_query_groups) == (192, 8, 6)
    assert model.max_position_embeddings == 20
    gated = small_config("--swiglu --hidden-size 256 --num-attention-heads 8")
    assert resolve(gated, 1).config.model.ffn_hidden_size == 640  # 682.7, down to a multiple of 64
    grouped = small_config("--group-query-attention --num-query-groups 2")
    assert resolve(grouped, 1).config.model.num_query_groups == 2


def test_batch_counts_follow_from_the_layout():
    run = resolve(small_config("--tensor-model-parallel-size 2 --global-batch-size 36"), 8)
    assert (run.data_parallel_size, run.num_microbatches) == (4, 3)
    assert (run.train_iters, run.train_samples) == (10, 360)
    assert resolve(small_config(), 4).config.training.global_batch_size == 12


def test_schedule_lengths_are_resolved_in_samples():
    run = resolve(small_config("--global-batch-size 6 --lr-warmup-iters 2 --lr-decay-iters 8"), 1)
    assert (run.decay_samples, run.warmup_samples) == (48, 12)
    by_samples = small_config(
        "--train-samples 100 --global-batch-size 6 --lr-warmup-samples 7",
        without=("--train-iters",),
    )
    run = resolve(by_samples, 1)
    assert (run.train_iters, run.train_samples) == (16, 100)
    assert (run.decay_samples, run.warmup_samples) == (100, 7)
    fraction = resolve(small_config("--global-batch-size 6 --lr-warmup-fraction 0.1"), 1)
    assert fraction.warmup_samples == 6
    wsd = small_config("--global-batch-size 6 --lr-decay-style WSD --lr-wsd-decay-iters 4")
    assert resolve(wsd, 1).wsd_decay_samples == 24


def test_vocabulary_is_padded_for_tensor_parallelism():
    text = "--make-vocab-size-divisible-by 100 --tensor-model-parallel-size 2"
    assert padded_vocab_size(small_config(text), 1001) == 1200
    assert padded_vocab_size(small_config(), 1024) == 1024
    assert padded_vocab_size(small_config(), 1025) == 1152


def test_metrics_file_and_weight_decay_have_defaults():
    assert resolve(small_config("--save s"), 1).config.logging.metrics_file == "s/metrics.jsonl"
    tensorboard_and_file = small_config("--tensorboard-dir t --metrics-file m")
    assert resolve(tensorboard_and_file, 1).config.logging.metrics_file == "m"
    decay = resolve(small_config("--weight-decay 0.3 --start-weight-decay 0.0"), 1).config.optimizer
    assert (decay.start_weight_decay, decay.end_weight_decay) == (0.0, 0.3)


def test_tokenizer_type_is_inferred_from_its_file():
    for model in ("t.json", "folder", "folder/t.model", "a.model.json"):
        tokenizer = resolve(small_config(f"--tokenizer-model {model}"), 1).config.tokenizer
        assert tokenizer.tokenizer_type == guess_type(model)
    explicit = small_config("--tokenizer-model t.model --tokenizer-type hf")
    assert resolve(explicit, 1).config.tokenizer.tokenizer_type == "hf"
