# SPDX-License-Identifier: Apache-2.0
"""Optimizer state in host memory: bit-equal updates, byte counts and split ranges."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.range_state import CUT_QUANTUM, split_range
from tests.support.closeness import assert_all_close, assert_all_equal
from tests.support.nan_memory import nan_memory
from tests.support.ranks import run_ranks
from tests.unit_tests.core.optimizer.gradient_steps import Training, random_gradients

STEPS = 3
KINDS = {
    "adam": {"kind": "adam", "adam_eps": 1e-5},
    "bf16_moments": {
        "kind": "adam",
        "adam_beta2": 0.95,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.bfloat16,
    },
    "momentum": {"kind": "sgd", "sgd_momentum": 0.9},
    "sgd": {"kind": "sgd"},
}


def train(groups: ProcessGroupCollection, kind: str, fraction: float, **options) -> Training:
    """Train with factors by name and clipping, so that every number of an update matters."""
    config = OptimizerConfig(
        **KINDS[kind],
        clip_grad=2.5,
        lr_factors=(("down*", 2.0),),
        offload_fraction=fraction,
    )
    training = Training(groups, config, **options)
    with nan_memory():
        for step in range(STEPS):
            assert training.step(random_gradients(step), lr=0.05, weight_decay=0.1).applied
    return training


def state_of(training: Training) -> dict[tuple, torch.Tensor]:
    """Return copies of all optimizer state by kind and box."""
    return {
        (kind, box.name, box.box.offsets): box.of(flat).clone()
        for state in training.optimizer.ranges
        for kind, flat in state.named_tensors().items()
        for box in state.owned.boxes
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_host_updates_are_bit_equal_to_device_updates(kind: str, dtype: torch.dtype):
    groups = ProcessGroupCollection.single()
    options = {"dtype": dtype}
    on_device, offloaded = train(groups, kind, 0.0, **options), train(groups, kind, 1.0, **options)
    for name, weight in on_device.logical().items():
        assert torch.equal(offloaded.logical()[name], weight), name
    expected, actual = state_of(on_device), state_of(offloaded)
    assert_all_equal(actual, expected)
    optimizer = offloaded.optimizer
    elements = sum(bucket.numel for bucket in offloaded.store.buckets)
    moments = {"adam": 8, "bf16_moments": 4, "momentum": 4, "sgd": 0}[kind]
    assert optimizer.state_bytes(on_host=False) == 0
    assert optimizer.state_bytes(on_host=True) == elements * (4 + moments)
    assert len(optimizer.host.states) == len(offloaded.store.buckets) > 2
    assert optimizer.host.bytes_to_host == STEPS * elements * 4
    assert optimizer.host.bytes_to_device == STEPS * elements * dtype.itemsize
    assert optimizer.params_norm() == on_device.optimizer.params_norm()
    assert (
        on_device.optimizer.state_bytes(on_host=True) == on_device.optimizer.host.bytes_to_host == 0
    )


@pytest.mark.parametrize("fraction", [0.3, 0.55])
def test_offload_fraction_moves_that_share_to_the_host(fraction: float):
    groups = ProcessGroupCollection.single()
    on_device = train(groups, "adam", 0.0, bucket_bytes=10**6)
    divided = train(groups, "adam", fraction, bucket_bytes=10**6)
    elements = sum(bucket.numel for bucket in divided.store.buckets)
    num_host_elements = sum(len(s.master) for s in divided.optimizer.ranges if s.on_host)
    assert (
        abs(num_host_elements - fraction * elements) <= len(divided.store.buckets) * CUT_QUANTUM / 2
    )
    assert divided.optimizer.state_bytes(on_host=True) == 12 * num_host_elements
    # on the device, fp32 weights serve as masters
    assert divided.optimizer.state_bytes(on_host=False) == 8 * (elements - num_host_elements)
    assert_all_close(divided.logical(), on_device.logical(), bound=2e-7)
    assert set(state_of(divided)) > set(state_of(on_device)), "some weight is split"


def test_masters_are_restored_or_reloaded_after_a_load():
    groups = ProcessGroupCollection.single()
    for dtype, expected in ((torch.float32, 3.0), (torch.bfloat16, 5.0)):
        training = train(groups, "adam", 1.0, dtype=dtype)
        for state in training.optimizer.ranges:
            state.owned.weights.fill_(3.0)
            if "master" in state.named_tensors():
                state.named_tensors()["master"].fill_(5.0)
        training.optimizer.after_load(with_state=True)
        assert all((s.master == expected).all() for s in training.optimizer.ranges)
        training.optimizer.after_load(with_state=False)
        assert all((s.master == 3.0).all() for s in training.optimizer.ranges)


def test_split_range_describes_the_same_elements():
    training = train(ProcessGroupCollection.single(), "adam", 0.0, bucket_bytes=10**6)
    owned = max(training.engine.owned(), key=lambda candidate: len(candidate.weights))
    positions = torch.arange(len(owned.weights))
    cuts = [32, 75, 200]
    sub_ranges = split_range(owned, cuts)
    starts = [0, *cuts]
    assert [len(p.weights) for p in sub_ranges] == [32, 43, 125, len(positions) - 200]

    def elements(ranges, start: int = 0) -> list[int]:
        return sorted(i + start for a, b in ranges for i in range(a, b))

    for field in ("decayed", "undecayed", "counted"):
        joined = (elements(getattr(p, field), s) for p, s in zip(sub_ranges, starts, strict=True))
        assert list(itertools.chain(*joined)) == elements(getattr(owned, field)), field
    unsplit = {name: torch.full(shape, -1) for name, shape in _shapes(owned).items()}
    from_sub_ranges = {name: torch.full(shape, -1) for name, shape in _shapes(owned).items()}
    for tensors, box, start in (
        *((unsplit, box, 0) for box in owned.boxes),
        *(
            (from_sub_ranges, b, s)
            for p, s in zip(sub_ranges, starts, strict=True)
            for b in p.boxes
        ),
    ):
        view = tensors[box.name]
        for dim, (offset, size) in enumerate(zip(box.box.offsets, box.box.sizes, strict=True)):
            view = view.narrow(dim, offset, size)
        view.copy_(box.of(positions[start:]))
    assert all(torch.equal(unsplit[name], from_sub_ranges[name]) for name in unsplit)
    sub_ranges[1].weights.fill_(7.0)
    equal = bool((owned.weights[32:75] == 7.0).all())
    assert equal
    assert sub_ranges[2].gradients.data_ptr() == owned.gradients[75:].data_ptr()


def _shapes(owned) -> dict[str, tuple[int, ...]]:
    return {box.name: box.shape for box in owned.boxes}


def compare_strategies(rank: int, world: int) -> list[bool]:
    bit_equal = []
    for grid in (RankGrid(world_size=2, tp=2), RankGrid(world_size=2)):
        groups = ProcessGroupCollection.create(grid, rank=rank)
        for strategy in ("no_shard", "optim", "optim_grads_params"):
            trainings = [train(groups, "adam", f, strategy=strategy) for f in (0.0, 1.0)]
            assert trainings[1].optimizer.state_bytes(on_host=False) == 0
            pairs = zip(trainings[0].shards(), trainings[1].shards(), strict=True)
            bit_equal.append(all(torch.equal(a[2], b[2]) for a, b in pairs))
    return bit_equal


def test_every_strategy_updates_its_shards_on_the_host():
    assert run_ranks(compare_strategies, 2) == [[True] * 6] * 2


def test_invalid_offload_fraction_is_refused():
    with pytest.raises(ValueError, match=r"offload_fraction.*1.5.*0.*1"):
        OptimizerConfig(offload_fraction=1.5)
