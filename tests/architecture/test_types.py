# SPDX-License-Identifier: Apache-2.0
"""A user's file that calls core passes the type checker, and its mistakes are reported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
USER_FILE = """
import torch
from megatron.core import ProcessGroupCollection
from megatron.core.inference import Engine, EngineConfig, EngineRequest
from megatron.core.models import GPTConfig, GPTModel

def build(config: GPTConfig) -> GPTModel:
    return GPTModel(config, ProcessGroupCollection.single(), dtype=torch.bfloat16)

def run(model: GPTModel) -> None:
    engine = Engine(model, EngineConfig(num_blocks=64))
    engine.add(EngineRequest(prompt=(1, 2), max_new_tokens=4))
    engine.step()
"""
MISTAKE = '\nGPTModel("a model", ProcessGroupCollection.single())\n'


@pytest.mark.slow(seconds=8)
def test_a_users_calls_of_core_type_check(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER_FILE + MISTAKE)
    config = {
        "include": ["user.py"],
        "extraPaths": [str(ROOT / "megatron_core")],
        "typeCheckingMode": "basic",
        "venvPath": str(Path(sys.prefix).parent),
        "venv": Path(sys.prefix).name,
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    checker = str(Path(sys.executable).with_name("basedpyright"))
    command = [checker, "-p", str(tmp_path), "--level", "error", "--outputjson"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    problems = json.loads(process.stdout)["generalDiagnostics"]
    lines = [problem["range"]["start"]["line"] for problem in problems]
    assert lines == [len(USER_FILE.splitlines()) + 1], problems
