# SPDX-License-Identifier: Apache-2.0
"""Flags of ten launch scripts that people train with: what is refused, and which model the rest is.

The number of parameters of each is a sum over the shapes of the architecture, written here.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron.cli.launch import Launch
from megatron.core.models.gpt import logical_weights
from megatron.training.config.model_table import gpt_config
from megatron.training.config.resolve import ResolvedRun
from megatron.training.pretrain_gpt import PRETRAIN_GPT, read_run
from megatron.training.pretrain_hybrid import PRETRAIN_HYBRID
from tools.upstream_flags import FOLDER

SCRIPTS = FOLDER / "launch_scripts"


def flags_of(script: str, folder: Path) -> tuple[int, list[list[str]]]:
    """Return for how many GPUs a script is, and its flags with their values."""
    text = (SCRIPTS / f"{script}.txt").read_text(encoding="utf-8")
    first, _, rest = text.partition("\n")
    for name, path in {
        "SAVE": "save",
        "DATA": "data",
        "TOK": "tokenizer",
        "SPM": "tokenizer.model",
        "VOCAB": "vocab.json",
        "MERGES": "merges.txt",
    }.items():
        rest = rest.replace(f"@{name}@", str(folder / path))
    world = re.search(r"WORLD=(\d+)", first)
    assert world is not None
    return int(world[1]), [flag.split() for flag in re.split(r"\s(?=--)", rest.strip())]


def llama(h: int, layers: int, *, ffn: int, heads: int, groups: int, vocab: int) -> int:
    """Return the parameters of a dense model with SwiGLU, RMSNorm and a head of its own."""
    keys = h // heads * groups
    layer = 2 * h * h + 2 * h * keys + 3 * h * ffn + 2 * h
    return 2 * vocab * h + layers * layer + h


def mixtral(
    h: int, layers: int, *, ffn: int, heads: int, groups: int, experts: int, vocab: int
) -> int:
    """Return the parameters of the same with a router and experts in every layer."""
    keys = h // heads * groups
    layer = 2 * h * h + 2 * h * keys + experts * 3 * h * ffn + experts * h + 2 * h
    return 2 * vocab * h + layers * layer + h


def gpt3(h: int, layers: int, *, positions: int, vocab: int) -> int:
    """Return the parameters of a GPT with biases, LayerNorm, learned positions and a tied head."""
    return (vocab + positions) * h + layers * (12 * h * h + 13 * h) + 2 * h


def deepseek_v3(vocab: int) -> int:
    """Return the parameters of DeepSeek-V3 with its depth of multi-token prediction, which shares
    embedding and head (DeepSeek-AI 2024, section 4.2)."""
    h, heads, q_rank, kv_rank, nope, rope, value = 7168, 128, 1536, 512, 128, 64, 128
    attention = h * q_rank + q_rank + q_rank * heads * (nope + rope)
    attention += h * (kv_rank + rope) + kv_rank + kv_rank * heads * (nope + value)
    attention += heads * value * h
    dense = attention + 3 * h * 18432 + 2 * h
    experts = attention + (256 + 1) * 3 * h * 2048 + 256 * h + 2 * h
    depth = experts + 2 * h * h + 3 * h  # its projection, two norms of inputs and a last one
    return 2 * vocab * h + 3 * dense + 58 * experts + h + depth


def qwen3_next(vocab: int) -> int:
    """Return the parameters of Qwen3-Next-80B-A3B without multi-token prediction."""
    h, heads, groups, channels = 2048, 16, 2, 256
    attention = h * 2 * heads * channels + 2 * h * groups * channels + heads * channels * h
    attention += 2 * channels  # norms of queries and keys
    keys, values = 16 * 128, 32 * 128
    delta = h * (2 * keys + 2 * values) + h * 2 * 32 + 4 * (2 * keys + values)
    delta += 2 * 32 + 128 + values * h  # decay and its bias, norm, output
    experts = 512 * h + 512 * 3 * h * 512 + 3 * h * 512 + h
    return 2 * vocab * h + 36 * delta + 12 * attention + 48 * (experts + 2 * h) + h


@dataclass(frozen=True)
class Script:
    """What becomes of a script.

    Args:
        parameters: of its model.
        vocab: tokens, without padding.
        refused: what each answer says, by flag.
        instead: words that follow the answers, by flag.
        dropped: flags that have nothing to say after that.
        options: values of the resolved run, by name.
    """

    parameters: int
    vocab: int
    refused: dict[str, str] = field(default_factory=dict)
    instead: dict[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    options: dict[str, object] = field(default_factory=dict)


LLAMA3_70B = llama(8192, 80, ffn=28672, heads=64, groups=8, vocab=128256)
SHARED = 50257
TABLE = {
    "cmu_moe_llama_182m": Script(
        mixtral(768, 12, ffn=3072, heads=12, groups=4, experts=8, vocab=32000),
        32000,
        options={"recompute_granularity": "selective", "sequence_parallel": False},
    ),
    "llmjp_llama2_13b": Script(
        llama(5120, 40, ffn=13824, heads=40, groups=40, vocab=32000),
        32000,
        options={"wandb_exp_name": "n", "recompute_granularity": "selective"},
    ),
    "lumi_europa_33b": Script(
        llama(7168, 56, ffn=20480, heads=56, groups=8, vocab=SHARED),
        SHARED,
        options={"num_layers_per_virtual_pipeline_stage": 2, "train_samples": 732421875},
    ),
    "mlperf_gpt3_175b": Script(
        gpt3(12288, 96, positions=2048, vocab=SHARED),
        SHARED,
        refused={"--no-scaled-init": "not supported"},
        options={"weight_decay_group": ("*=1",), "eval_iters": 0},
    ),
    "nvidia_v2_gpt3_175b": Script(
        gpt3(12288, 96, positions=2048, vocab=SHARED),
        SHARED,
        options={
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            "rampup_batch_size": (16, 16, 5859375),
        },
    ),
    "pai_deepseek_v3": Script(
        deepseek_v3(129280),
        129280,
        refused={
            "--extra-vocab-size": "--vocab-size",
            "--patch-tokenizer-type": "--tokenizer-model",
        },
        instead={
            "--extra-vocab-size": "--vocab-size 129280",
            "--patch-tokenizer-type": "--tokenizer-type hf --tokenizer-model tokenizer.json",
        },
        options={
            "position_embedding_type": "yarn",
            "yarn_rotary_scaling_factor": 40.0,
            "yarn_original_max_position_embeddings": 4096,
            "use_rope_scaling": False,
            "mtp_num_layers": 1,
            "qk_pos_emb_head_dim": 64,
            "save_optim": False,
            "kv_channels": None,
        },
    ),
    "rocm_llama3_70b": Script(
        LLAMA3_70B, 128256, options={"save_interval": 5000, "eval_iters": 0, "save": None}
    ),
    "rocm_mixtral_8x22b": Script(
        mixtral(6144, 56, ffn=16384, heads=48, groups=8, experts=8, vocab=32768),
        32768,
        refused={"--moe-router-force-load-balancing": "not supported"},
        options={"recompute_granularity": "full", "recompute_num_layers": 50},
    ),
    "slime_qwen3_next": Script(
        qwen3_next(151936),
        151936,
        refused={"--spec": "GEGEGE*E"},
        instead={"--spec": f"--hybrid-layer-pattern {'GEGEGE*E' * 12}"},
        dropped=("--num-layers", "--moe-layer-freq", "--mtp-num-layers"),
        options={"attention_output_gate": True, "optimizer_cpu_offload": True},
    ),
    "swissai_llama3_70b": Script(
        LLAMA3_70B,
        128256,
        refused={"--main-grads-dtype": "--grad-reduce-in-bf16"},
        options={"use_rope_scaling": True, "rope_scaling_factor": 8.0, "async_save": True},
    ),
}

#: Sizes of the published models.
PUBLISHED = {"llmjp_llama2_13b": 13_015_864_320, "rocm_llama3_70b": 70_553_706_496}


def resolved(script: str, found: list[list[str]], world: int) -> ResolvedRun:
    """Return the run of flags, without a question of what this machine has."""
    words = [word for flag in found for word in flag]
    program = PRETRAIN_HYBRID if "--hybrid-layer-pattern" in words else PRETRAIN_GPT
    gone = [flag[0] for flag in found if flag[0] == "--transformer-impl"]
    kept = [word for flag in found if flag[0] not in gone for word in flag]
    return read_run(kept, Launch(world_size=world), program=program)


def test_every_script_has_a_row() -> None:
    assert sorted(TABLE) == sorted(path.stem for path in SCRIPTS.glob("*.txt"))
    assert len(TABLE) == 10


@pytest.mark.parametrize("script", TABLE)
def test_what_a_launch_script_is_refused_for(script: str, tmp_path: Path) -> None:
    world, found = flags_of(script, tmp_path)
    answers: list[str] = []
    try:
        resolved(script, found, world)
    except ValueError as error:
        answers = str(error).split("; ")
    refused = TABLE[script].refused
    assert len(answers) == len(refused), answers
    for answer, (flag, advice) in zip(answers, refused.items(), strict=True):
        assert answer.startswith(flag)
        assert advice in answer


@pytest.mark.parametrize("script", TABLE)
def test_a_launch_script_is_the_model_that_it_means(script: str, tmp_path: Path) -> None:
    row = TABLE[script]
    world, found = flags_of(script, tmp_path)
    gone = {*row.refused, *row.dropped}
    kept = [flag for flag in found if flag[0] not in gone]
    kept += [words.split() for words in row.instead.values()]
    run = resolved(script, kept, world)
    options = {
        name: v for section in vars(run.config).values() for name, v in vars(section).items()
    }
    assert {name: options[name] for name in row.options} == row.options
    weights = logical_weights(gpt_config(run.config, row.vocab))
    assert sum(math.prod(shape) for shape in weights.values()) == row.parameters
    assert PUBLISHED.get(script, row.parameters) == row.parameters
