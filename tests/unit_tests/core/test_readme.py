# SPDX-License-Identifier: Apache-2.0
"""The program of megatron-core's README, run word for word: on one rank and on two, stopped and
resumed, against an uninterrupted run and against an optimizer of torch."""

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

from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups import ProcessGroupCollection
from tests.support.ranks import start_ranks

README = Path(__file__).parents[3] / "megatron_core/README.md"
STEPS, SAVED = 8, 4


def follow(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Run the README's program in a folder; return the state that it ends with."""
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
    with start_ranks(follow, world, str(folder), env=address, init=False) as ranks:
        return ranks.values(timeout=60)


def trained_by_torch(config: Any) -> dict[str, torch.Tensor]:
    """Return the weights that the README's steps lead to, by an optimizer of torch's."""
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
def test_the_readme_resumes_bit_for_bit(tmp_path: Path, world: int) -> None:
    whole = run_readme(world, tmp_path / "whole")
    (tmp_path / "resumed/checkpoints").mkdir(parents=True)
    name = f"checkpoints/iter_{SAVED:07d}"
    shutil.copytree(tmp_path / "whole" / name, tmp_path / "resumed" / name)
    resumed = run_readme(world, tmp_path / "resumed")
    wanted = trained_by_torch(whole[0]["config"])
    for one, other in zip(whole, resumed, strict=True):
        assert (one["first"], other["first"], one["sharded"]) == (0, SAVED, world > 1)
        assert "optimizer.steps" in {name for name, _, _ in one["state"]}
        for (*place, value), (*same_place, again) in zip(one["state"], other["state"], strict=True):
            assert place == same_place
            assert torch.equal(value, again), place
        for name, weight in wanted.items():
            assert float((one["weights"][name] - weight).abs().max()) < 2e-5, name
