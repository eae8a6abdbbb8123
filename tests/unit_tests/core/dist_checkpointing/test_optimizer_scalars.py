# SPDX-License-Identifier: Apache-2.0
"""Scalar optimizer state in checkpoints: the number of updates and the loss scale."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.core import ProcessGroupCollection
from megatron.core.dist_checkpointing import (
    CheckpointError,
    Solo,
    load_checkpoint,
    optimizer_chunks,
    read_extra,
    read_manifest,
    save_checkpoint,
    weight_chunks,
)
from megatron.core.distributed import DataParallel
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.optimizer import (
    DynamicLossScaler,
    DynamicLossScalerConfig,
    Optimizer,
    OptimizerConfig,
)
from megatron.core.transformer import AttentionConfig, MLPConfig
from tests.support.inputs import generator

FROZEN = Path(__file__).parents[3] / "functional_tests/frozen/version_1/iter_0000004"
GROUPS = ProcessGroupCollection.single()
CONFIG = GPTConfig(
    num_layers=1,
    hidden_size=8,
    vocab_size=16,
    attention=AttentionConfig(num_attention_heads=2, num_query_groups=1, kv_channels=4),
    mlp=MLPConfig(ffn_hidden_size=12),
)
SCALER = DynamicLossScalerConfig(initial_scale=2.0**10, growth_interval=3, hysteresis=2)


class Training:
    """A model with its engine and its optimizer.

    Args:
        dynamic: use dynamic loss scaling.
        kind: optimizer, such as `adam`.
    """

    def __init__(self, *, dynamic: bool = False, kind: str = "adam") -> None:
        self.model = GPTModel(CONFIG, GROUPS, seed=1)
        self.engine = DataParallel(self.model.store, GROUPS)
        self.optimizer = Optimizer(
            self.engine.owned(),
            GROUPS,
            config=OptimizerConfig(kind=kind, sgd_momentum=0.5),
            scaler=DynamicLossScaler(SCALER) if dynamic else None,
            weights=[handle.sharding for handle in self.model.store.handles.values()],
        )

    def step(self, number: int, *, overflow: bool = False) -> None:
        tokens = torch.randint(0, 16, (2, 9), generator=generator(5, number))
        weights = torch.full((2, 8), 1 / 16)
        self.engine.begin_step()
        loss, _ = self.model.loss(tokens[:, :-1], tokens[:, 1:], weights)
        factor = float("inf") if overflow else self.optimizer.scaler.scale
        self.engine.backward(loss * factor, last=True)
        self.engine.finish()
        assert self.optimizer.step(1e-2).applied is not overflow
        self.engine.start_param_sync()

    def chunks(self, *, scalars: bool = True):
        return weight_chunks(self.model.store) + optimizer_chunks(self.optimizer, scalars=scalars)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def same_weights(a: Training, b: Training) -> bool:
    pairs = zip(a.weights().values(), b.weights().values(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


@pytest.mark.parametrize("kind", ["adam", "sgd", "muon"])
def test_dynamic_loss_scale_and_updates_resume(tmp_path: Path, kind: str) -> None:
    uninterrupted, resumed = Training(dynamic=True, kind=kind), Training(dynamic=True, kind=kind)
    for number, overflow in enumerate((True, True, False, False, False, False, True)):
        uninterrupted.step(number, overflow=overflow)
    folder = save_checkpoint(tmp_path, 7, uninterrupted.chunks(), {}, coordinator=Solo())
    load_checkpoint(folder, resumed.chunks())
    resumed.optimizer.after_load(with_state=True)
    # Two overflows halve 1024, three good steps double 512; then a good step and an overflow.
    expected = {"scale": 1024.0, "good_steps": 0, "overflows_left": 1}
    assert resumed.optimizer.scaler.state_dict() == expected
    assert resumed.optimizer.steps == 4
    for training in (uninterrupted, resumed):
        training.step(7, overflow=True)
        training.step(8)
    assert resumed.optimizer.scaler.scale == 512.0
    assert same_weights(uninterrupted, resumed)


def test_missing_updates_are_an_error_not_zero(tmp_path: Path) -> None:
    uninterrupted = Training()
    for number in range(3):
        uninterrupted.step(number)
    folder = save_checkpoint(
        tmp_path, 3, uninterrupted.chunks(scalars=False), {}, coordinator=Solo()
    )
    assert not any(name.startswith("optimizer.steps") for name in read_manifest(folder).tensors)
    fix = r"after_load\(with_state=True, steps=\.\.\.\)"
    resumed = Training()
    with pytest.raises(CheckpointError, match=rf"optimizer\.steps is missing from.*{fix}"):
        load_checkpoint(folder, resumed.chunks())
    load_checkpoint(folder, resumed.chunks(), missing="keep")
    with pytest.raises(ValueError, match=fix):
        resumed.optimizer.after_load(with_state=True)
    resumed.optimizer.after_load(with_state=True, steps=3)
    for training in (uninterrupted, resumed):
        training.step(3)
    assert same_weights(uninterrupted, resumed)


def test_weights_without_state_forget_the_moments(tmp_path: Path) -> None:
    fresh, trained = Training(), Training()
    folder = save_checkpoint(tmp_path, 0, weight_chunks(fresh.model.store), {}, coordinator=Solo())
    trained.step(0)
    load_checkpoint(folder, weight_chunks(trained.model.store))
    trained.optimizer.after_load(with_state=False)
    for training in (fresh, trained):
        training.step(1)
    assert same_weights(fresh, trained)


def test_step_count_without_state_is_refused() -> None:
    optimizer = Training().optimizer
    for with_state, steps in ((False, 3), (True, -1)):
        with pytest.raises(ValueError, match=f"steps={steps}"):
            optimizer.after_load(with_state=with_state, steps=steps)
    optimizer.after_load(with_state=True)  # a checkpoint of step 0: moments are zero
    assert optimizer.steps == 0


def test_application_checkpoint_keeps_steps_in_extra() -> None:
    """The README of megatron-core takes `after_load(steps=...)` from this JSON."""
    manifest = read_manifest(FROZEN)
    assert "optimizer.exp_avg/embedding.weight" in manifest.tensors
    assert "optimizer.steps" not in manifest.tensors
    assert read_extra(FROZEN)["optimizer"]["steps"] == 4
