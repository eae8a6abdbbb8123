# SPDX-License-Identifier: Apache-2.0
"""Runs of hybrids: every layout has the numbers of one process, on documents packed to length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import read_extra
from megatron.core.models.gpt import GPTConfig
from megatron.training import pretrain_gpt
from megatron.training.exit_codes import ExitCode
from megatron.training.gpt_options import gpt_config
from megatron.training.launch import Launch
from megatron.training.pretrain_gpt import read_run
from megatron.training.pretrain_hybrid import PRETRAIN_HYBRID
from tests.functional_tests.small_run import flags, losses, running, write_tokens

CP, PP, TP = (f"--{kind}-parallel-size 2" for kind in ("context", "pipeline-model", "tensor-model"))
PACKED = "--reset-position-ids --reset-attention-mask --eod-mask-loss"
SHORT = f"--train-iters 3 --eval-interval 3 --lr-warmup-iters 0 {PACKED}"
SHAPES = (
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 "
    "--linear-value-head-dim 8 --mamba-head-dim 12 --mamba-state-dim 8 --mamba-num-groups 2 "
    "--attention-output-gate --apply-layernorm-1p"
)
MODEL = f"--num-layers 6 --hybrid-layer-pattern G-M-*-/*- {SHAPES}"


def train(world: int, argv: list[str]) -> str:
    """Run on so many ranks, each with one thread, and return the last one's log."""
    with running(world, argv) as ranks:
        found = ranks.outcomes(timeout=100)
        first, log = ranks.log(0), ranks.log(world - 1)
    assert all(outcome.exit_code == 0 for outcome in found), (first, log)
    return log


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> Path:
    """Return where documents are, which a token ends."""
    prefix = write_tokens(tmp_path_factory.mktemp("data") / "tokens")
    described = {"tokenizer": {"vocab_size": 61, "eod": 3}}
    prefix.with_suffix(".json").write_text(json.dumps(described))
    return prefix


@pytest.fixture(scope="module")
def alone(prefix, tmp_path_factory) -> Path:
    """Train on one process, with a checkpoint on the way, and return the folder."""
    folder = tmp_path_factory.mktemp("alone")
    train(1, flags(prefix, f"{SHORT} {MODEL} --save {folder} --save-interval 2"))
    return folder


def test_a_run_goes_on_with_samples_cut_over_ranks(prefix, alone, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    more = f"{SHORT} {MODEL} {CP} --load {alone / 'iter_0000002'} --metrics-file {metrics}"
    log = train(2, flags(prefix, more))
    for name in ("gated delta net", "Mamba-2"):
        assert f"{name}: recurrences over context parallel 2 by " in log
    assert "mtp 1 loss" in log
    for kind in ("train", "validation"):
        wanted = losses(alone / "metrics.jsonl", kind)
        assert losses(metrics, kind) == pytest.approx({3: wanted[3]}, rel=1e-5)


def test_a_checkpoint_says_what_its_model_is(alone, capsys):
    words = f"--load {alone} --use-checkpoint-args --micro-batch-size 2 --lr 5e-3 --seq-length 24"
    run = read_run(words.split(), Launch(), program=PRETRAIN_HYBRID)
    saved = GPTConfig.from_json(read_extra(alone / "iter_0000003")["model"])
    assert gpt_config(run.config, 61) == saved
    assert (saved.pattern, saved.mtp_pattern) == ("G-M-*-", "*-")
    other = f"{words} --hybrid-layer-pattern G-*-M-/*-"
    assert pretrain_gpt.main(other.split(), {}, program=PRETRAIN_HYBRID) == ExitCode.USER_ERROR
    assert "is of another model: pattern: 'G-M-*-' in" in capsys.readouterr().err


def test_documents_matter_to_recurrences(prefix, tmp_path):
    """Layers without attention: what they see is the state alone."""
    found = []
    for name, packed in (("packed", PACKED), ("whole", "")):
        metrics = tmp_path / f"{name}.jsonl"
        more = SHORT.replace(PACKED, packed).replace("--train-iters 3 --eval-interval 3", "")
        model = f"--num-layers 4 --hybrid-layer-pattern G-M- {SHAPES}"
        more += f" {model} --train-iters 1 --eval-interval 0 --metrics-file {metrics}"
        words = flags(prefix, more)
        for flag in ("--num-attention-heads", "--num-query-groups", "--attention-dropout"):
            at = words.index(flag)
            del words[at : at + 2]
        kept = [w for w in words if w not in ("--group-query-attention", "--attention-output-gate")]
        train(1, kept)
        found.append(losses(metrics)[1])
    assert abs(found[0] - found[1]) > 1e-5, found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world", "more"),
    [
        (2, f"{PP} --hybrid-layer-pattern G-|M-*-/*-"),
        (2, f"{PP} --hybrid-layer-pattern G|-M|-*|-/*- --num-layers 6"),
        (4, f"{TP} {CP} --sequence-parallel --linear-cp-mode segments"),
        (4, f"{CP} --linear-cp-mode headwise"),
        (2, f"{TP} --recompute-granularity full --recompute-method uniform "
         "--recompute-num-layers 1 --linear-recurrence-splits 2"),
        (2, "--data-parallel-sharding-strategy optim_grads_params --overlap-param-gather"),
    ],
)  # fmt: skip
def test_every_layout_has_the_losses_of_one(prefix, alone, tmp_path, world, more):
    metrics = tmp_path / "metrics.jsonl"
    train(world, flags(prefix, f"{SHORT} {MODEL} {more} --metrics-file {metrics}"))
    for kind in ("train", "validation"):
        wanted = losses(alone / "metrics.jsonl", kind)
        assert losses(metrics, kind) == pytest.approx(wanted, rel=1e-5)
