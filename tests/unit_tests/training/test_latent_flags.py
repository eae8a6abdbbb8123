# SPDX-License-Identifier: Apache-2.0
"""What Megatron-LM's flags of multi-latent attention mean: YaRN by default, and latents with norms.

Megatron-LM's rule: YaRN with factor 40 (--rotary-scaling-factor), 4,096 original positions, beta 32
and 1, mscale 1 and mscale of all features 0, unless --rope-type rope is given.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megatron.cli.launch import Launch
from megatron.cli.schema import flatten, options
from megatron.cli.yaml_file import write_options
from megatron.training.config import Config
from megatron.training.config.model_table import gpt_config
from megatron.training.config.resolve import ResolvedRun
from megatron.training.pretrain_gpt import read_run

ROPE = "--position-embedding-type rope"
LATENT = (
    "--num-layers 2 --hidden-size 48 --num-attention-heads 6 --seq-length 20 --micro-batch-size 3 "
    "--train-iters 10 --lr 1e-3 --mock-data --vocab-size 61 --disable-bias-linear "
    "--multi-latent-attention --qk-layernorm"
)


def run_of(text: str) -> ResolvedRun:
    """Return the run of a command line."""
    return read_run(text.split(), Launch())


@pytest.mark.parametrize(
    ("flags", "factor"),
    [
        (ROPE, 40.0),
        ("--use-rotary-position-embeddings", 40.0),
        ("--position-embedding-type yarn", 40.0),
        (f"{ROPE} --rope-type yarn", 40.0),
        (f"{ROPE} --rotary-scaling-factor 32", 32.0),
        (f"{ROPE} --rotary-scaling-factor 1", 1.0),
        ("--position-embedding-type yarn --yarn-rotary-scaling-factor 8", 8.0),
        (f"{ROPE} --rope-type rope", None),
        (f"{ROPE} --rope-type rope --rotary-scaling-factor 40", None),
        (f"{ROPE} --use-rope-scaling --kv-channels 9", 40.0),
    ],
)
def test_latent_attention_rope_matches_megatron(flags: str, factor: float | None) -> None:
    rope = gpt_config(run_of(f"{LATENT} {flags}").config, 61).rope
    assert rope is not None
    if factor is None:
        assert rope.scaling is None
        return
    assert rope.scaling is not None
    scaling = vars(rope.scaling)
    assert (scaling["kind"], scaling["factor"]) == ("yarn", factor)
    assert (scaling["original_max_position"], scaling["beta_fast"]) == (4096, 32.0)
    assert scaling["beta_slow"] == 1.0
    assert rope.scaling.magnitude == pytest.approx(1.0 + 0.1 * math.log(factor))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{ROPE} --no-qk-layernorm", "add --qk-layernorm"),
        ("--rope-type rope --position-embedding-type yarn", "--rope-type rope contradicts"),
        (f"{ROPE} --rope-type rope --use-rope-scaling", "--use-rope-scaling has no effect"),
        (
            f"{ROPE} --rotary-scaling-factor 40 --yarn-rotary-scaling-factor 8",
            "--rotary-scaling-factor 40.0 contradicts --yarn-rotary-scaling-factor 8.0",
        ),
        ("--rope-type yarn", "use rope or yarn"),
        (f"{ROPE} --no-multi-latent-attention --rope-type yarn", "--rope-type yarn has no effect"),
        (f"{ROPE} --no-multi-latent-attention --rotary-scaling-factor 2", "has no effect without"),
    ],
)
def test_contradicting_latent_flags_are_refused(flags: str, message: str) -> None:
    words = f"{LATENT} {flags}".split()
    if "--no-qk-layernorm" in words:
        words.remove("--qk-layernorm")
    with pytest.raises(ValueError, match=message):
        read_run(words, Launch())


def test_config_file_keeps_its_rope_and_is_read_back(tmp_path: Path) -> None:
    # Config files printed before this rule: plain rotary embeddings, no norms of latents.
    words = LATENT.removesuffix(" --multi-latent-attention --qk-layernorm")
    (tmp_path / "old.yaml").write_text(
        "multi-latent-attention: true\nposition-embedding-type: rope\nqk-layernorm: false\n"
    )
    old = gpt_config(run_of(f"{words} --config {tmp_path / 'old.yaml'}").config, 61)
    assert old.rope is not None
    assert old.rope.scaling is None
    for flags in (ROPE, f"{ROPE} --rope-type rope"):
        run = run_of(f"{LATENT} {flags}")
        (tmp_path / "new.yaml").write_text(write_options(flatten(run.config), options(Config)))
        assert run_of(f"--config {tmp_path / 'new.yaml'}") == run
    explicit = run_of(f"{words} --config {tmp_path / 'old.yaml'} --rope-type yarn")
    assert explicit.config.rope_scaling.yarn_rotary_scaling_factor == 40.0
