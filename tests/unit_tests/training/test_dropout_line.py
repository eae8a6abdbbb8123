# SPDX-License-Identifier: Apache-2.0
"""Log lines on dropout and the attention kernel; guides and recipes turn dropout off."""

import re
from pathlib import Path

import pytest
import torch
import yaml

from megatron.core.ops.attention import fused
from megatron.training.config.model_table import gpt_config
from megatron.training.startup_report import attention_line, dropout_line
from tests.unit_tests.training.small_config import small_config

ROOT = Path(__file__).resolve().parents[3]
OFF = {"attention": "--attention-dropout 0", "hidden": "--hidden-dropout 0"}


@pytest.mark.parametrize(
    ("words", "device", "names", "leaves_kernel"),
    [
        ("--attention-dropout 0.1 --hidden-dropout 0.2", "cuda", {"attention", "hidden"}, True),
        ("--attention-dropout 0.1 --hidden-dropout 0", "cpu", {"attention"}, False),
        ("--attention-dropout 0 --hidden-dropout 0.1", "cuda", {"hidden"}, False),
        (
            "--attention-dropout 0.1 --hidden-dropout 0 --attention-backend reference",
            "cuda",
            {"attention"},
            False,
        ),
        ("--attention-dropout 0 --hidden-dropout 0", "cuda", set(), False),
    ],
)
def test_log_names_active_dropout_and_its_kernel_cost(words, device, names, leaves_kernel):
    line = dropout_line(small_config(words), torch.device(device)) or ""
    assert {name for name, flag in OFF.items() if flag in line} == names
    assert bool(line) == bool(names)
    assert ("kernel" in line) == leaves_kernel


@pytest.mark.parametrize(
    ("words", "kernel", "reason"),
    [
        ("--bf16 --kv-channels 64", "cuDNN", ""),
        ("--bf16 --kv-channels 192", "FlashAttention-2", ""),
        ("", "Triton", "float32"),
        ("--bf16 --attention-dropout 0.1", "plain torch", "dropout"),
        ("--bf16 --kv-channels 64 --window-size 8,0", "FlashAttention-2", "no window"),
        ("--bf16 --kv-channels 64 --reset-attention-mask", "FlashAttention-2", "no documents"),
        (
            "--bf16 --reset-attention-mask --cuda-graph-impl full_iteration",
            "Triton",
            "ids alone",
        ),
        ("--bf16 --attention-backend triton", "triton", "--attention-backend"),
        (
            "--bf16 --kv-channels 64 --reset-attention-mask --context-parallel-size 2",
            "block: torch's fused kernels (cuDNN)",
            "",
        ),
    ],
)
def test_gpu_run_names_its_attention_kernel(monkeypatch, words, kernel, reason):
    monkeypatch.setattr(fused, "device_capability", lambda device: (9, 0))
    monkeypatch.setattr(fused, "_has_cudnn", lambda: True)
    config = small_config(f"--attention-dropout 0 {words}")
    model = gpt_config(config, 128)
    line = attention_line(config, model, torch.device("cuda", 0))
    assert kernel in line
    assert reason in line
    assert attention_line(config, model, torch.device("cpu")) is None


def test_guides_and_recipes_train_without_dropout():
    """Commands that describe a model turn dropout off; the others read it from a checkpoint."""
    num_commands = 0
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for command in re.findall(r"^\s*(?:torchrun|python) .*pretrain_\w+ --.*", text, re.M):
            if not re.search(r"--use-checkpoint-args|--load-hf|--config", command):
                assert all(flag in command for flag in OFF.values()), f"{page.name}: {command}"
                num_commands += 1
    assert num_commands >= 4
    recipes = list((ROOT / "examples").rglob("*.yaml"))
    assert recipes
    for recipe in recipes:
        values = yaml.safe_load(recipe.read_text(encoding="utf-8"))
        assert not values.get("hidden-dropout", 0.1), recipe
        has_attention = "num-attention-heads" in values
        assert not has_attention or not values.get("attention-dropout", 0.1), recipe
