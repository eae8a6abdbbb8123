# SPDX-License-Identifier: Apache-2.0
"""The program of megatron-core's README, run verbatim on one rank and on two: a resumed run against
an uninterrupted run, and both against torch's AdamW."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core import ProcessGroupCollection
from megatron.core.models import GPTModel
from tests.support.ranks import start_ranks

README = Path(__file__).parents[3] / "megatron_core/README.md"
STEPS, SAVED_STEP = 8, 4


def run_program(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Run the README's program in a folder and return its final state."""
    os.chdir(folder)
    names = runpy.run_path("train.py")
    assert names["optimizer"].steps == STEPS
    return {
        "first": names["first"],
        "sharded": names["engine"].sharded,
        "config": names["config"],
        "weights": {n: p.detach().clone() for n, p in names["model"].named_parameters()},
        "state": [(c.name, str(c.box), c.tensor.clone()) for c in names["chunks"]],
    }


def run_readme(world: int, folder: Path) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 3
    (folder / "train.py").write_text("\n".join(blocks))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with start_ranks(run_program, world, str(folder), env=address, init=False) as ranks:
        return ranks.values(timeout=60)


def train_with_torch(config: Any) -> dict[str, torch.Tensor]:
    """Train the README's model with torch's AdamW and return its weights."""
    model = GPTModel(config, ProcessGroupCollection.single(), seed=1)
    parameters = list(model.parameters())
    adam = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0)
    for step in range(STEPS):
        batch = torch.randint(0, 256, (8, 33), generator=torch.Generator().manual_seed(step))
        inputs, labels = batch[:, :-1], batch[:, 1:]
        model.loss(inputs, labels, torch.full(inputs.shape, 1.0 / inputs.numel()))[0].backward()
        norm = torch.sqrt(sum(p.grad.square().sum() for p in parameters))
        for p in parameters:
            p.grad.div_(max(1.0, float(norm) + 1e-6))
        adam.step()
        adam.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("world", [1, 2])
def test_readme_program_resumes_bit_for_bit(tmp_path: Path, world: int) -> None:
    whole = run_readme(world, tmp_path / "whole")
    (tmp_path / "resumed/checkpoints").mkdir(parents=True)
    name = f"checkpoints/iter_{SAVED_STEP:07d}"
    shutil.copytree(tmp_path / "whole" / name, tmp_path / "resumed" / name)
    resumed = run_readme(world, tmp_path / "resumed")
    expected = train_with_torch(whole[0]["config"])
    for whole_rank, resumed_rank in zip(whole, resumed, strict=True):
        assert (whole_rank["first"], resumed_rank["first"], whole_rank["sharded"]) == (
            0,
            SAVED_STEP,
            world > 1,
        )
        assert "optimizer.steps" in {name for name, _, _ in whole_rank["state"]}
        for (*key, value), (*resumed_key, resumed_value) in zip(
            whole_rank["state"], resumed_rank["state"], strict=True
        ):
            assert key == resumed_key
            assert torch.equal(value, resumed_value), key
        for name, weight in expected.items():
            assert float((whole_rank["weights"][name] - weight).abs().max()) < 2e-5, name
