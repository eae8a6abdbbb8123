# SPDX-License-Identifier: Apache-2.0
"""State in host memory: bit-equal to state on the device, counted, and divided without a seam."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.range_state import CUT_QUANTUM, split_range
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from tests.support.closeness import assert_all_close
from tests.support.nan_memory import nan_memory
from tests.support.ranks import run_ranks
from tests.unit_tests.core.optimizer.gradient_steps import Training, drawn

STEPS = 3
KINDS = {
    "adam": {"kind": "adam", "adam_eps": 1e-5},
    "narrow": {
        "kind": "adam",
        "adam_beta2": 0.95,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.bfloat16,
    },
    "momentum": {"kind": "sgd", "sgd_momentum": 0.9},
    "sgd": {"kind": "sgd"},
}


def train(groups: ProcessGroupCollection, kind: str, fraction: float, **options) -> Training:
    """Train with factors by name and clipping, so that all of an update's numbers matter."""
    config = OptimizerConfig(
        **KINDS[kind],
        clip_grad=2.5,
        lr_factors=(("down*", 2.0),),
        offload_fraction=fraction,
    )
    training = Training(groups, config, **options)
    with nan_memory():
        for step in range(STEPS):
            assert training.step(drawn(step), lr=0.05, weight_decay=0.1).applied
    return training


def state_of(training: Training) -> dict[tuple, torch.Tensor]:
    """Return copies of all optimizer state by kind and box."""
    return {
        (kind, placed.name, placed.box.offsets): placed.of(flat).clone()
        for state in training.optimizer.ranges
        for kind, flat in state.named_tensors().items()
        for placed in state.owned.boxes
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_updates_on_the_host_are_equal_in_every_bit(kind: str, dtype: torch.dtype):
    groups = ProcessGroupCollection.single()
    given = {"dtype": dtype}
    plain, offloaded = train(groups, kind, 0.0, **given), train(groups, kind, 1.0, **given)
    for name, weight in plain.logical().items():
        assert torch.equal(offloaded.logical()[name], weight), name
    wanted, found = state_of(plain), state_of(offloaded)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    ours = offloaded.optimizer
    elements = sum(bucket.numel for bucket in offloaded.store.buckets)
    moments = {"adam": 8, "narrow": 4, "momentum": 4, "sgd": 0}[kind]
    assert ours.state_bytes(on_host=False) == 0
    assert ours.state_bytes(on_host=True) == elements * (4 + moments)
    assert len(ours.host.states) == len(offloaded.store.buckets) > 2
    assert ours.host.bytes_to_host == STEPS * elements * 4
    assert ours.host.bytes_to_device == STEPS * elements * dtype.itemsize
    assert ours.params_norm() == plain.optimizer.params_norm()
    assert plain.optimizer.state_bytes(on_host=True) == plain.optimizer.host.bytes_to_host == 0


@pytest.mark.parametrize("fraction", [0.3, 0.55])
def test_a_share_is_on_the_host_and_the_rest_stays(fraction: float):
    groups = ProcessGroupCollection.single()
    plain = train(groups, "adam", 0.0, bucket_bytes=10**6)
    divided = train(groups, "adam", fraction, bucket_bytes=10**6)
    elements = sum(bucket.numel for bucket in divided.store.buckets)
    host = sum(len(s.master) for s in divided.optimizer.ranges if s.on_host)
    assert abs(host - fraction * elements) <= len(divided.store.buckets) * CUT_QUANTUM / 2
    assert divided.optimizer.state_bytes(on_host=True) == 12 * host
    # on the device fp32 weights are their own masters
    assert divided.optimizer.state_bytes(on_host=False) == 8 * (elements - host)
    assert_all_close(divided.logical(), plain.logical(), bound=2e-7)
    assert set(state_of(divided)) > set(state_of(plain)), "the cut went through no weight"


def test_masters_follow_weights_that_are_loaded():
    groups = ProcessGroupCollection.single()
    for dtype, kept in ((torch.float32, 3.0), (torch.bfloat16, 5.0)):
        training = train(groups, "adam", 1.0, dtype=dtype)
        for state in training.optimizer.ranges:
            state.owned.weights.fill_(3.0)
            if "master" in state.named_tensors():
                state.named_tensors()["master"].fill_(5.0)
        training.optimizer.after_load(with_state=True)
        assert all((s.master == kept).all() for s in training.optimizer.ranges)
        training.optimizer.after_load(with_state=False)
        assert all((s.master == 3.0).all() for s in training.optimizer.ranges)


def test_parts_of_a_range_describe_the_same_elements():
    training = train(ProcessGroupCollection.single(), "adam", 0.0, bucket_bytes=10**6)
    owned = max(training.engine.owned(), key=lambda one: len(one.weights))
    numbers = torch.arange(len(owned.weights))
    cuts = [32, 75, 200]
    parts = split_range(owned, cuts)
    starts = [0, *cuts]
    assert [len(p.weights) for p in parts] == [32, 43, 125, len(numbers) - 200]

    def elements(ranges, start: int = 0) -> list[int]:
        return sorted(i + start for a, b in ranges for i in range(a, b))

    for field in ("decayed", "undecayed", "counted"):
        joined = (elements(getattr(p, field), s) for p, s in zip(parts, starts, strict=True))
        assert list(itertools.chain(*joined)) == elements(getattr(owned, field)), field
    whole = {name: torch.full(shape, -1) for name, shape in _shapes(owned).items()}
    again = {name: torch.full(shape, -1) for name, shape in _shapes(owned).items()}
    for found, placed, start in (
        *((whole, placed, 0) for placed in owned.boxes),
        *((again, b, s) for p, s in zip(parts, starts, strict=True) for b in p.boxes),
    ):
        view = found[placed.name]
        for dim, (first, size) in enumerate(zip(placed.box.offsets, placed.box.sizes, strict=True)):
            view = view.narrow(dim, first, size)
        view.copy_(placed.of(numbers[start:]))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    parts[1].weights.fill_(7.0)
    equal = bool((owned.weights[32:75] == 7.0).all())
    assert equal
    assert parts[2].gradients.data_ptr() == owned.gradients[75:].data_ptr()


def _shapes(owned) -> dict[str, tuple[int, ...]]:
    return {placed.name: placed.shape for placed in owned.boxes}


def two_ranks(rank: int, world: int) -> list[bool]:
    found = []
    for grid in (RankGrid(world_size=2, tp=2), RankGrid(world_size=2)):
        groups = ProcessGroupCollection.create(grid, rank=rank)
        for strategy in ("no_shard", "optim", "optim_grads_params"):
            both = [train(groups, "adam", f, strategy=strategy) for f in (0.0, 1.0)]
            assert both[1].optimizer.state_bytes(on_host=False) == 0
            pairs = zip(both[0].pieces(), both[1].pieces(), strict=True)
            found.append(all(torch.equal(a[2], b[2]) for a, b in pairs))
    return found


def test_every_strategy_updates_its_shards_on_the_host():
    assert run_ranks(two_ranks, 2) == [[True] * 6] * 2


def test_a_share_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"offload_fraction is 1.5: use 0 to 1"):
        OptimizerConfig(offload_fraction=1.5)
