# SPDX-License-Identifier: Apache-2.0
"""Flags of ten published launch scripts: the refused flags, and the model the others describe.

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
from tests.support.upstream_flags import FOLDER

SCRIPTS_FOLDER = FOLDER / "launch_scripts"


def read_script(script: str, folder: Path) -> tuple[int, list[list[str]]]:
    """Return a script's number of GPUs, and its flags with their values."""
    text = (SCRIPTS_FOLDER / f"{script}.txt").read_text(encoding="utf-8")
    header, _, body = text.partition("\n")
    for name, path in {
        "SAVE": "save",
        "DATA": "data",
        "TOK": "tokenizer",
        "SPM": "tokenizer.model",
        "VOCAB": "vocab.json",
        "MERGES": "merges.txt",
    }.items():
        body = body.replace(f"@{name}@", str(folder / path))
    world = re.search(r"WORLD=(\d+)", header)
    assert world is not None
    return int(world[1]), [flag.split() for flag in re.split(r"\s(?=--)", body.strip())]


def llama(h: int, layers: int, *, ffn: int, heads: int, groups: int, vocab: int) -> int:
    """Return the parameters of a dense model with SwiGLU, RMSNorm and an untied head."""
    keys = h // heads * groups
    layer = 2 * h * h + 2 * h * keys + 3 * h * ffn + 2 * h
    return 2 * vocab * h + layers * layer + h


def mixtral(
    h: int, layers: int, *, ffn: int, heads: int, groups: int, experts: int, vocab: int
) -> int:
    """Return the parameters of a `llama` model with a router and experts in every layer."""
    keys = h // heads * groups
    layer = 2 * h * h + 2 * h * keys + experts * 3 * h * ffn + experts * h + 2 * h
    return 2 * vocab * h + layers * layer + h


def gpt3(h: int, layers: int, *, positions: int, vocab: int) -> int:
    """Return the parameters of a GPT with biases, LayerNorm, learned positions and a tied head."""
    return (vocab + positions) * h + layers * (12 * h * h + 13 * h) + 2 * h


def deepseek_v3(vocab: int) -> int:
    """Return the parameters of DeepSeek-V3 with its multi-token prediction layer, which shares
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
class ExpectedScript:
    """The expected outcome of a launch script.

    Args:
        parameters: number of parameters of the model.
        vocab: vocabulary size without padding.
        refused: text that each error message contains, by flag.
        instead: replacement words that follow the error messages, by flag.
        dropped: flags that the replacements make superfluous.
        options: expected values of the resolved run, by name.
    """

    parameters: int
    vocab: int
    refused: dict[str, str] = field(default_factory=dict)
    instead: dict[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    options: dict[str, object] = field(default_factory=dict)


LLAMA3_70B = llama(8192, 80, ffn=28672, heads=64, groups=8, vocab=128256)
SHARED = 50257
EXPECTED = {
    "cmu_moe_llama_182m": ExpectedScript(
        mixtral(768, 12, ffn=3072, heads=12, groups=4, experts=8, vocab=32000),
        32000,
        options={"recompute_granularity": "selective", "sequence_parallel": False},
    ),
    "llmjp_llama2_13b": ExpectedScript(
        llama(5120, 40, ffn=13824, heads=40, groups=40, vocab=32000),
        32000,
        options={"wandb_exp_name": "n", "recompute_granularity": "selective"},
    ),
    "lumi_europa_33b": ExpectedScript(
        llama(7168, 56, ffn=20480, heads=56, groups=8, vocab=SHARED),
        SHARED,
        options={"num_layers_per_virtual_pipeline_stage": 2, "train_samples": 732421875},
    ),
    "mlperf_gpt3_175b": ExpectedScript(
        gpt3(12288, 96, positions=2048, vocab=SHARED),
        SHARED,
        refused={"--no-scaled-init": "not supported"},
        options={"weight_decay_group": ("*=1",), "eval_iters": 0},
    ),
    "nvidia_v2_gpt3_175b": ExpectedScript(
        gpt3(12288, 96, positions=2048, vocab=SHARED),
        SHARED,
        options={
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            "rampup_batch_size": (16, 16, 5859375),
        },
    ),
    "pai_deepseek_v3": ExpectedScript(
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
    "rocm_llama3_70b": ExpectedScript(
        LLAMA3_70B, 128256, options={"save_interval": 5000, "eval_iters": 0, "save": None}
    ),
    "rocm_mixtral_8x22b": ExpectedScript(
        mixtral(6144, 56, ffn=16384, heads=48, groups=8, experts=8, vocab=32768),
        32768,
        refused={"--moe-router-force-load-balancing": "not supported"},
        options={"recompute_granularity": "full", "recompute_num_layers": 50},
    ),
    "slime_qwen3_next": ExpectedScript(
        qwen3_next(151936),
        151936,
        refused={"--spec": "GEGEGE*E"},
        instead={"--spec": f"--hybrid-layer-pattern {'GEGEGE*E' * 12}"},
        dropped=("--num-layers", "--moe-layer-freq", "--mtp-num-layers"),
        options={"attention_output_gate": True, "optimizer_cpu_offload": True},
    ),
    "swissai_llama3_70b": ExpectedScript(
        LLAMA3_70B,
        128256,
        refused={"--main-grads-dtype": "--grad-reduce-in-bf16"},
        options={"use_rope_scaling": True, "rope_scaling_factor": 8.0, "async_save": True},
    ),
}

#: Sizes of the published models.
PUBLISHED = {"llmjp_llama2_13b": 13_015_864_320, "rocm_llama3_70b": 70_553_706_496}


def resolve_flags(script: str, flags: list[list[str]], world: int) -> ResolvedRun:
    """Return the run of flags, without --transformer-impl, whose library may be absent here."""
    all_words = [word for flag in flags for word in flag]
    program = PRETRAIN_HYBRID if "--hybrid-layer-pattern" in all_words else PRETRAIN_GPT
    unavailable = [flag[0] for flag in flags if flag[0] == "--transformer-impl"]
    usable = [word for flag in flags if flag[0] not in unavailable for word in flag]
    return read_run(usable, Launch(world_size=world), program=program)


def test_every_launch_script_has_an_expectation() -> None:
    assert sorted(EXPECTED) == sorted(path.stem for path in SCRIPTS_FOLDER.glob("*.txt"))
    assert len(EXPECTED) == 10


@pytest.mark.parametrize("script", EXPECTED)
def test_launch_script_refusals_name_the_fix(script: str, tmp_path: Path) -> None:
    world, flags = read_script(script, tmp_path)
    answers: list[str] = []
    try:
        resolve_flags(script, flags, world)
    except ValueError as error:
        answers = str(error).split("; ")
    refused = EXPECTED[script].refused
    assert len(answers) == len(refused), answers
    for answer, (flag, advice) in zip(answers, refused.items(), strict=True):
        assert answer.startswith(flag)
        assert advice in answer


@pytest.mark.parametrize("script", EXPECTED)
def test_launch_script_builds_the_published_model(script: str, tmp_path: Path) -> None:
    expected = EXPECTED[script]
    world, flags = read_script(script, tmp_path)
    removed = {*expected.refused, *expected.dropped}
    accepted = [flag for flag in flags if flag[0] not in removed]
    accepted += [words.split() for words in expected.instead.values()]
    run = resolve_flags(script, accepted, world)
    options = {
        name: v for section in vars(run.config).values() for name, v in vars(section).items()
    }
    assert {name: options[name] for name in expected.options} == expected.options
    weights = logical_weights(gpt_config(run.config, expected.vocab))
    assert sum(math.prod(shape) for shape in weights.values()) == expected.parameters
    assert PUBLISHED.get(script, expected.parameters) == expected.parameters
