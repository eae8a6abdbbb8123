# SPDX-License-Identifier: Apache-2.0
"""The optimizer against torch.optim over several steps, and norms that count each weight once."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.optimizer import OptimizerConfig, range_state
from tests.support.closeness import assert_all_close, assert_piece_close
from tests.support.nan_memory import nan_memory
from tests.support.ranks import run_ranks
from tests.unit_tests.core.optimizer.gradient_steps import Training, random_gradients


def torch_optimizer(config: OptimizerConfig, weights: dict[str, torch.Tensor], decay: float):
    """Return torch's optimizer, with a parameter group without weight decay."""
    plain = [weights[n] for n in ("norm", "down.bias")]
    decayed = [w for n, w in weights.items() if n not in ("norm", "down.bias")]
    groups = [
        {"params": decayed, "weight_decay": decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    if config.kind == "sgd":
        return torch.optim.SGD(groups, lr=1.0, momentum=config.sgd_momentum)
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=1.0, betas=betas, eps=config.adam_eps)


@pytest.mark.parametrize("scale", [1.0, 4096.0])
@pytest.mark.parametrize("clip", [0.0, 2.5, 1e6])
@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "adam", "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-5},
        {"kind": "sgd"},
        {"kind": "sgd", "sgd_momentum": 0.9},
    ],
    ids=["adam", "sgd", "momentum"],
)
def test_steps_match_torch_optimizers(settings: dict, clip: float, scale: float):
    config = OptimizerConfig(**settings, clip_grad=clip)
    training = Training(ProcessGroupCollection.single(), config, scale=scale)
    weights = {n: w.double().requires_grad_(True) for n, w in training.logical().items()}
    reference = torch_optimizer(config, weights, decay=0.1)
    for step in range(4):
        gradients, lr = random_gradients(step), 0.1 / (1 + step)
        with nan_memory():
            step_result = training.step(gradients, lr=lr, weight_decay=0.1)
        for name, weight in weights.items():
            weight.grad = gradients[name].double()
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), clip or math.inf)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        assert step_result.applied
        assert step_result.grad_norm == pytest.approx(float(norm), rel=1e-6)
        assert_all_close(training.logical(), weights, bound=2e-6)
    assert training.optimizer.steps == 4
    norm = math.sqrt(sum(float(w.detach().square().sum()) for w in weights.values()))
    assert training.optimizer.params_norm() == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_low_precision_weights_follow_their_masters(kind: str):
    """Steps far below a bf16 rounding step must add up in the masters."""
    config = OptimizerConfig(kind=kind, clip_grad=0.0)
    training = Training(ProcessGroupCollection.single(), config, dtype=torch.bfloat16)
    weights = {n: w.float().requires_grad_(True) for n, w in training.logical().items()}
    reference = torch_optimizer(config, weights, decay=0.0)
    for group in reference.param_groups:
        group["lr"] = 1e-4
    for _ in range(20):
        training.step(random_gradients(0), lr=1e-4)
        for name, weight in weights.items():
            weight.grad = random_gradients(0)[name]
        reference.step()
    masters = {}
    for state in training.optimizer.ranges:
        assert state.master.dtype is torch.float32
        assert set(state.named_tensors()) >= {"master"}
        for box in state.owned.boxes:
            masters[box.name] = box.of(state.master)
    assert_all_close(masters, weights, bound=2e-6)
    for name, weight in training.logical().items():
        assert torch.equal(weight, masters[name].bfloat16()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranges_share_kernel_calls_unless_moments_are_bf16(dtype: torch.dtype):
    """One kernel call for decayed and one for undecayed ranges; no host number is copied."""
    config = OptimizerConfig(clip_grad=2.5, exp_avg_dtype=dtype)
    training = Training(ProcessGroupCollection.single(), config, scale=8.0, bucket_bytes=100)
    decay_factors = [
        update_range.decay_factor for s in training.optimizer.ranges for update_range in s.updates
    ]
    assert len(training.optimizer.ranges) == 4
    assert len(decay_factors) > len(set(decay_factors)) == 2
    forbidden = mock.patch.object(torch, "tensor", side_effect=AssertionError("a copy"))
    with mock.patch.object(range_state, "adamw", wraps=range_state.adamw) as kernel, forbidden:
        training.step(random_gradients(0), lr=0.1, weight_decay=1.0)
    decays = [call.kwargs["weight_decay"] for call in kernel.call_args_list]
    assert sorted(decays) == sorted(set(decay_factors) if dtype is torch.float32 else decay_factors)
    assert all(call.kwargs["grad_scale"] is not None for call in kernel.call_args_list)


def test_master_weights_can_be_reloaded_from_weights():
    config = OptimizerConfig(kind="sgd", clip_grad=0.0)
    training = Training(ProcessGroupCollection.single(), config, dtype=torch.bfloat16)
    for state in training.optimizer.ranges:
        state.owned.weights.fill_(3.0)
        state.reload_master()
        equal = bool((state.master == 3.0).all())
        assert equal
    full = Training(ProcessGroupCollection.single(), config)
    for state in full.optimizer.ranges:
        assert state.master.data_ptr() == state.owned.weights.data_ptr()
        assert state.named_tensors() == {}


def layouts() -> list[RankGrid]:
    """Return the layouts of four ranks."""
    return [
        RankGrid(world_size=4, tp=2),
        RankGrid(world_size=4, tp=2, etp=1, ep=2),
        RankGrid(world_size=4, tp=2, etp=1, ep=4),
        RankGrid(world_size=4, tp=2, cp=2),
        RankGrid(world_size=4, instances=2),
    ]


def train_on_four_ranks(rank: int, world: int) -> list[dict]:
    """Run every layout and strategy with Adam, clipping and a NaN on a single rank."""
    runs = []
    for grid in layouts():
        groups = ProcessGroupCollection.create(grid, rank=rank)
        for strategy in ("no_shard", "optim"):
            config = OptimizerConfig(clip_grad=2.5, count_zeros=True)
            training = Training(groups, config, strategy=strategy, scale=8.0)
            step_results = [training.step(random_gradients(0), lr=0.1, weight_decay=0.1)]
            before = _state(training)
            for culprit in range(world):
                fault = math.nan if rank == culprit else 0.0
                skipped = training.step(random_gradients(1), fault=fault, lr=0.1, weight_decay=0.1)
                assert not skipped.applied
                assert math.isnan(skipped.grad_norm)
                after = _state(training)
                assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
                assert training.optimizer.steps == 1
            step_results.append(training.step(random_gradients(2), lr=0.1, weight_decay=0.1))
            norm = training.optimizer.params_norm()
            runs.append({"results": step_results, "norm": norm, "shards": training.shards()})
    return runs


def _state(training: Training) -> list[torch.Tensor]:
    """Return copies of all tensors that a step changes."""
    tensors = [bucket.data.clone() for bucket in training.store.buckets]
    for state in training.optimizer.ranges:
        tensors += [tensor.clone() for tensor in state.named_tensors().values()]
    return tensors


def test_four_ranks_count_every_weight_once_and_skip_together():
    config = OptimizerConfig(clip_grad=2.5, count_zeros=True)
    single = Training(ProcessGroupCollection.single(), config, scale=8.0)
    expected = [single.step(random_gradients(step), lr=0.1, weight_decay=0.1) for step in (0, 2)]
    zeros = [sum(int((g == 0).sum()) for g in random_gradients(step).values()) for step in (0, 2)]
    weights = single.logical()
    for runs in run_ranks(train_on_four_ranks, 4):
        assert len(runs) == 2 * len(layouts())
        for run in runs:
            for actual, ref, count in zip(run["results"], expected, zeros, strict=True):
                assert actual.applied
                assert actual.num_zeros == ref.num_zeros == count
                assert actual.grad_norm == pytest.approx(ref.grad_norm, rel=1e-6)
            assert run["norm"] == pytest.approx(single.optimizer.params_norm(), rel=1e-6)
            for name, offsets, values in run["shards"]:
                assert_piece_close(name, values, weights[name], offsets, bound=2e-6)


def test_infinite_gradients_skip_the_step_and_update_the_scaler():
    class RecordingScaler:
        scale = 2.0

        def __init__(self) -> None:
            self.updates: list[bool] = []

        def update(self, found_inf: bool) -> None:
            self.updates.append(found_inf)

    training = Training(ProcessGroupCollection.single(), OptimizerConfig())
    scaler = training.optimizer.scaler = RecordingScaler()  # type: ignore[assignment]
    assert training.step(random_gradients(0), lr=0.1).applied
    assert not training.step(random_gradients(1), fault=math.inf, lr=0.1).applied
    assert scaler.updates == [False, True]


def test_all_invalid_settings_are_reported_at_once():
    with pytest.raises(ValueError) as caught:
        OptimizerConfig(
            kind="adagrad",
            adam_beta1=1.0,
            adam_beta2=-0.1,
            adam_eps=0.0,
            sgd_momentum=math.nan,
            clip_grad=-1.0,
        )
    text = str(caught.value)
    assert "optimizer 'adagrad': use one of adam, sgd" in text
    for name in ("adam_beta1 is 1.0", "adam_beta2 is -0.1", "adam_eps is 0.0", "clip_grad is -1.0"):
        assert name in text
    assert "sgd_momentum is nan" in text
