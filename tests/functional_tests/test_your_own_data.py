# SPDX-License-Identifier: Apache-2.0
"""The bash blocks of docs/your-own-data.md run in order."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron.core.datasets import IndexedDataset
from megatron.core.dist_checkpointing import latest_checkpoint

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "your-own-data.md"


@pytest.mark.slow(seconds=60)
@pytest.mark.timeout(600)
def test_every_command_of_the_page_works(tmp_path):
    for folder in ("megatron", "megatron_core/megatron"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 12
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    outputs = []
    for block in blocks:
        process = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert process.returncode == 0, f"{block}\n{process.stdout}\n{process.stderr}"
        outputs.append(process.stdout)
    combined_output = "\n".join(outputs)
    sources = len(list(tmp_path.glob("data/texts/*.txt")))
    assert f"wrote data/mine.bin and .idx: {sources:,} documents" in combined_output
    assert IndexedDataset(tmp_path / "data" / "mine").num_documents == sources
    assert latest_checkpoint(tmp_path / "data" / "model").name == "iter_0000040"
    assert "resuming at iteration 30" in combined_output
    assert "can be exported as LlamaForCausalLM" in combined_output
    assert latest_checkpoint(tmp_path / "data" / "chat-model").name == "iter_0000004"
    assert "resuming at iteration 2" in combined_output
    trained, tuned = (
        load_file(tmp_path / "data" / name / "model.safetensors")
        for name in ("model-hf", "chat-model-hf")
    )
    assert trained.keys() == tuned.keys()
    assert not torch.equal(trained["model.norm.weight"], tuned["model.norm.weight"])
    (generated,) = (
        text for block, text in zip(blocks, outputs, strict=True) if "inference.generate" in block
    )
    assert generated.startswith("def main(")
    assert len(generated) > len("def main(\n")
    (comparison,) = (
        text
        for block, text in zip(blocks, outputs, strict=True)
        if "import AutoModelForCausalLM" in block
    )
    assert "verified: logits differ" in comparison
    assert "\ndef main(" in comparison
