# SPDX-License-Identifier: Apache-2.0
"""Muon orthogonalises the same joined matrices as Megatron-LM, on any layout."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core import Group, ProcessGroupCollection, RankGrid
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.moe import MoEConfig
from megatron.core.optimizer import MuonConfig, Optimizer, OptimizerConfig
from megatron.core.ssm import GatedDeltaNetConfig, Mamba2Config
from megatron.core.transformer import (
    AttentionConfig,
    LatentAttentionConfig,
    MLPConfig,
    NormConfig,
)
from megatron.core.weight_gather import WeightHandle
from tests.support.closeness import assert_piece_close, relative_error
from tests.support.inputs import generator
from tests.support.ranks import run_ranks

LR = 0.1
EXPERTS = 2

MIXERS = GPTConfig(
    num_layers=5,
    hidden_size=20,
    vocab_size=32,
    pattern="GM+-E",
    attention=LatentAttentionConfig(
        num_attention_heads=2,
        q_lora_rank=6,
        kv_lora_rank=7,
        nope_channels=5,
        rope_channels=4,
        value_channels=3,
    ),
    mlp=MLPConfig(ffn_hidden_size=12, gated=True, activation="silu"),
    norm=NormConfig(kind="RMSNorm"),
    moe=MoEConfig(num_experts=EXPERTS, ffn_hidden_size=8, bias=True),
    delta_net=GatedDeltaNetConfig(
        num_key_heads=2, num_value_heads=4, key_channels=3, value_channels=2
    ),
    mamba=Mamba2Config(num_heads=4, head_channels=2, num_groups=2, state_channels=3),
)
ATTENTION = GPTConfig(
    num_layers=1,
    hidden_size=20,
    vocab_size=32,
    attention=AttentionConfig(
        num_attention_heads=4, num_query_groups=2, kv_channels=4, output_gate=True
    ),
    mlp=MLPConfig(ffn_hidden_size=12, gated=False),
)


def block(number: int, kind: str, *tensors: str) -> tuple[str, ...]:
    return tuple(f"decoder.blocks.{number}.{kind}.{tensor}.weight" for tensor in tensors)


#: Logical tensors of each matrix that Megatron-LM stores as a single fused weight.
JOINED = (
    block(0, "delta_net", "query", "key", "value", "beta", "alpha", "gate"),
    block(1, "mamba", "x", "B", "C", "dt", "gate"),
    block(2, "attention", "kv_down", "key_rope"),
    block(2, "attention", "key_up", "value_up"),
    block(3, "mlp", "gate", "up"),
    block(4, "moe", "experts.gate", "experts.up"),
)
QKV = block(0, "attention", "query", "key", "value", "gate")
LATENT_INPUTS = block(2, "attention", "query_down", "kv_down", "key_rope")


class SteppedModel:
    """A model after an optimizer step with known logical gradients.

    Args:
        joined: Muon settings that define which tensors form a matrix.
    """

    def __init__(
        self,
        config: GPTConfig,
        groups: ProcessGroupCollection,
        *,
        strategy: str = "no_shard",
        **joined: object,
    ) -> None:
        data_parallel = DataParallelConfig(strategy=strategy)
        self.model = GPTModel(
            config, groups, seed=4, storage=data_parallel.storage(bucket_bytes=9000)
        )
        self.groups = groups
        engine = DataParallel(self.model.store, groups, config=data_parallel)
        muon = MuonConfig(momentum=0.0, **joined)  # type: ignore[arg-type]
        optimizer = Optimizer(
            engine.owned(),
            groups,
            config=OptimizerConfig(kind="muon", clip_grad=0.0, muon=muon),
            weights=[handle.sharding for handle in self.model.store.handles.values()],
        )
        engine.begin_step()
        self.before = self.shards()
        engine.set_is_last_backward(True)
        for handle in self.model.store.handles.values():
            handle.accumulate_grad(self._local_gradient(handle))
        engine.finish()
        assert optimizer.step(LR).applied
        engine.start_param_sync(force_sync=True)
        assert optimizer.muon is not None
        self.owned_matrices = optimizer.muon.owned_matrices

    def _local_gradient(self, handle: WeightHandle) -> torch.Tensor:
        """Return this rank's addend of a weight's gradient, uneven over the ranks of the sum."""
        sharding, groups = handle.sharding, self.groups
        share = _share(groups["expert_dp" if sharding.expert else "dense_dp"])
        if sharding.gradient.get("tp") == "partial":
            share *= _share(groups["tp"])
        flat = torch.zeros(handle.shape).flatten()
        for box in self.model.store.boxes(handle):
            gradient = gradient_of(box.name, box.shape)[box.box.slices]
            flat[box.start : box.start + box.numel] = gradient.flatten() * share
        return flat.view(handle.shape)

    def shards(self) -> dict[tuple[str, tuple[int, ...]], torch.Tensor]:
        """Return this rank's weight shards by name and offsets."""
        shards = {}
        for handle in self.model.store.handles.values():
            flat = handle.get().reshape(-1)
            for box in self.model.store.boxes(handle):
                shards[box.name, box.offsets] = box.of(flat).clone()
        return shards


def _share(group: Group) -> float:
    """Return uneven shares that add up to one, exact in binary."""
    return {1: (1.0,), 2: (0.25, 0.75), 4: (0.125, 0.25, 0.125, 0.5)}[group.size][group.rank]


def gradient_of(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=generator(7, *name.encode()))


def newton_schulz(x: torch.Tensor) -> torch.Tensor:
    """Apply five published iterations to a matrix in fp64, scaled by sqrt(max(rows, columns))."""
    tall = x.shape[0] > x.shape[1]
    u = (x.T if tall else x) / x.norm()
    for _ in range(5):
        gram = u @ u.T
        u = 3.4445 * u + (-4.7750 * gram + 2.0315 * gram @ gram) @ u
    return math.sqrt(max(x.shape)) * (u.T if tall else u)


def updated(
    before: dict[str, torch.Tensor], matrices: tuple[tuple[str, ...], ...]
) -> dict[str, torch.Tensor]:
    """Return the logical tensors of some matrices after the step, computed in fp64."""
    tensors = {}
    for names in matrices:
        gradients = [gradient_of(n, tuple(before[n].shape)).double() for n in names]
        experts = gradients[0].dim() == 3
        gradients_by_matrix = zip(*gradients, strict=True) if experts else [gradients]
        moves = [
            newton_schulz(torch.cat(list(matrix_gradients)))
            for matrix_gradients in gradients_by_matrix
        ]
        move = torch.stack(moves) if experts else moves[0]
        rows = [gradient.shape[-2] for gradient in gradients]
        for name, tensor_move in zip(names, move.split(rows, dim=-2), strict=True):
            tensors[name] = before[name].double() - LR * tensor_move
    return tensors


def logical(shards: dict[tuple[str, tuple[int, ...]], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return full tensors from a single process, which holds interleaved tensors in units."""
    blocks: dict[str, list[torch.Tensor]] = {}
    for name, _ in sorted(shards):
        blocks.setdefault(name, [])
    for (name, offsets), values in sorted(shards.items(), key=lambda shard: shard[0]):
        assert not any(offsets[1:])
        blocks[name].append(values)
    return {name: torch.cat(tensor_blocks) for name, tensor_blocks in blocks.items()}


def assert_matrices(stepped: SteppedModel, matrices: tuple[tuple[str, ...], ...]) -> None:
    """Compare a single process with the equations, and with updates of separate tensors, which
    must differ unless the matrix has a single tensor."""
    before, after = logical(stepped.before), logical(stepped.shards())
    for name, expected in updated(before, matrices).items():
        assert_piece_close(name, after[name], expected, [0] * expected.dim())
    for names in matrices:
        for name, separately in updated(before, tuple((n,) for n in names)).items():
            difference = relative_error(
                after[name].double() - before[name], separately - before[name]
            )
            assert (difference > 0.03) == (len(names) > 1), (name, difference)


def test_muon_joins_the_same_tensors_as_megatron():
    stepped = SteppedModel(MIXERS, ProcessGroupCollection.single())
    single_tensor_matrices = (
        block(2, "attention", "query_down"),
        block(2, "attention", "query_up"),
    )
    assert_matrices(stepped, JOINED + single_tensor_matrices)
    outputs = 5 + EXPERTS  # output matrices of five blocks, and one per expert
    assert (
        stepped.owned_matrices == len(JOINED) - 1 + EXPERTS + len(single_tensor_matrices) + outputs
    )


@pytest.mark.parametrize(
    ("split", "matrices"),
    [(True, tuple((name,) for name in QKV)), (False, (QKV,))],
    ids=["split", "joined"],
)
def test_split_qkv_affects_only_attention_projections(
    split: bool, matrices: tuple[tuple[str, ...], ...]
):
    single = ProcessGroupCollection.single()
    assert_matrices(SteppedModel(ATTENTION, single, split_qkv=split), matrices)
    assert_matrices(SteppedModel(MIXERS, single, split_qkv=split), JOINED)


def test_all_splits_every_tensor_and_whole_splits_none():
    single = ProcessGroupCollection.single()
    separate = tuple((name,) for names in JOINED for name in names)
    assert_matrices(SteppedModel(MIXERS, single, split_matrices="all"), separate)
    unsplit = SteppedModel(MIXERS, single, split_matrices="whole")
    assert_matrices(unsplit, (*JOINED[:2], LATENT_INPUTS, *JOINED[3:]))
    assert_matrices(SteppedModel(ATTENTION, single, split_matrices="whole"), (QKV,))


def test_tensor_assigned_to_adamw_leaves_its_muon_matrix():
    stepped = SteppedModel(MIXERS, ProcessGroupCollection.single(), adam_names=("*.alpha.weight",))
    names = tuple(name for name in JOINED[0] if "alpha" not in name)
    assert_matrices(stepped, (names, *JOINED[1:]))


def step_on_layouts(rank: int, world: int) -> list[dict]:
    torch.set_num_threads(1)
    shards_by_layout = []
    for degrees, strategy in LAYOUTS:
        groups = ProcessGroupCollection.create(RankGrid(world_size=world, **degrees), rank=rank)
        shards_by_layout.append(SteppedModel(MIXERS, groups, strategy=strategy).shards())
    return shards_by_layout


#: Grids of four ranks and the data-parallel strategy.
LAYOUTS = (
    ({"tp": 2, "etp": 1, "ep": 2}, "optim_grads_params"),
    ({"tp": 2, "gtp": 2, "etp": 2}, "no_shard"),
    ({"gtp": 2, "egtp": 2, "ep": 2}, "optim"),
)


def test_every_layout_updates_full_matrices():
    before = logical(SteppedModel(MIXERS, ProcessGroupCollection.single()).before)
    expected = updated(before, JOINED)
    for ranks in zip(*run_ranks(step_on_layouts, 4), strict=True):
        num_compared = dict.fromkeys(expected, 0)
        for shards in ranks:
            for (name, offsets), values in shards.items():
                if name in expected:
                    assert_piece_close(name, values, expected[name], offsets)
                    num_compared[name] += values.numel()
        assert all(count >= expected[name].numel() for name, count in num_compared.items())
