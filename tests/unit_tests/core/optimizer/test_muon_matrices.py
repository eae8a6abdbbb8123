# SPDX-License-Identifier: Apache-2.0
"""Which matrices Muon orthogonalises whole: those of Megatron-LM, on any layout."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.moe import MoEConfig
from megatron.core.optimizer import MuonConfig, Optimizer, OptimizerConfig
from megatron.core.process_groups import Group, ProcessGroupCollection, RankGrid
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
    moe=MoEConfig(num_experts=EXPERTS, ffn_hidden_size=8),
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


#: The logical tensors of each matrix that Megatron-LM has as one weight, of several tensors here.
WHOLE = (
    block(0, "delta_net", "query", "key", "value", "beta", "alpha", "gate"),
    block(1, "mamba", "x", "B", "C", "dt", "gate"),
    block(2, "attention", "kv_down", "key_rope"),
    block(2, "attention", "key_up", "value_up"),
    block(3, "mlp", "gate", "up"),
    block(4, "moe", "experts.gate", "experts.up"),
)
QKV = block(0, "attention", "query", "key", "value", "gate")
LATENT_INPUTS = block(2, "attention", "query_down", "kv_down", "key_rope")


class Stepped:
    """A model whose weights one optimizer step has moved, by logical gradients that are given.

    Args:
        joined: the settings that say what is one matrix.
    """

    def __init__(
        self,
        config: GPTConfig,
        groups: ProcessGroupCollection,
        *,
        strategy: str = "no_shard",
        **joined: object,
    ) -> None:
        placed = DataParallelConfig(strategy=strategy)
        self.model = GPTModel(config, groups, seed=4, storage=placed.storage(bucket_bytes=9000))
        self.groups = groups
        engine = DataParallel(self.model.store, groups, config=placed)
        muon = MuonConfig(momentum=0.0, **joined)  # type: ignore[arg-type]
        optimizer = Optimizer(
            engine.owned(),
            groups,
            config=OptimizerConfig(kind="muon", clip_grad=0.0, muon=muon),
            weights=[handle.sharding for handle in self.model.store.handles.values()],
        )
        engine.begin_step()
        self.before = self.pieces()
        engine.set_is_last_backward(True)
        for handle in self.model.store.handles.values():
            handle.accumulate_grad(self._local_gradient(handle))
        engine.finish()
        assert optimizer.step(LR).applied
        engine.start_param_sync(force_sync=True)
        assert optimizer.muon is not None
        self.owned_matrices = optimizer.muon.owned_matrices

    def _local_gradient(self, handle: WeightHandle) -> torch.Tensor:
        """Return this rank's addend of a weight's gradient: uneven over the ranks that add up."""
        sharding, groups = handle.sharding, self.groups
        share = _share(groups["expert_dp" if sharding.expert else "dense_dp"])
        if sharding.gradient.get("tp") == "partial":
            share *= _share(groups["tp"])
        flat = torch.zeros(handle.shape).flatten()
        for box in self.model.store.boxes(handle):
            piece = gradient_of(box.name, box.shape)[box.box.slices]
            flat[box.start : box.start + box.numel] = piece.flatten() * share
        return flat.view(handle.shape)

    def pieces(self) -> dict[tuple[str, tuple[int, ...]], torch.Tensor]:
        """Return what this rank holds of the weights, by name and offsets."""
        found = {}
        for handle in self.model.store.handles.values():
            flat = handle.get().reshape(-1)
            for box in self.model.store.boxes(handle):
                found[box.name, box.offsets] = box.of(flat).clone()
        return found


def _share(group: Group) -> float:
    """Return uneven shares that add up to one, exact in binary."""
    return {1: (1.0,), 2: (0.25, 0.75), 4: (0.125, 0.25, 0.125, 0.5)}[group.size][group.rank]


def gradient_of(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=generator(7, *name.encode()))


def newton_schulz(x: torch.Tensor) -> torch.Tensor:
    """Return five published iterations on a matrix in fp64, scaled by the larger of its sizes."""
    tall = x.shape[0] > x.shape[1]
    u = (x.T if tall else x) / x.norm()
    for _ in range(5):
        gram = u @ u.T
        u = 3.4445 * u + (-4.7750 * gram + 2.0315 * gram @ gram) @ u
    return math.sqrt(max(x.shape)) * (u.T if tall else u)


def updated(
    before: dict[str, torch.Tensor], matrices: tuple[tuple[str, ...], ...]
) -> dict[str, torch.Tensor]:
    """Return the logical tensors of some matrices after the step, each matrix whole in fp64."""
    found = {}
    for names in matrices:
        gradients = [gradient_of(n, tuple(before[n].shape)).double() for n in names]
        experts = gradients[0].dim() == 3
        of_each = zip(*gradients, strict=True) if experts else [gradients]
        moves = [newton_schulz(torch.cat(list(one))) for one in of_each]
        move = torch.stack(moves) if experts else moves[0]
        rows = [gradient.shape[-2] for gradient in gradients]
        for name, part in zip(names, move.split(rows, dim=-2), strict=True):
            found[name] = before[name].double() - LR * part
    return found


def logical(pieces: dict[tuple[str, tuple[int, ...]], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return whole tensors; of a single process only, which has units of interleaved ones."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, _ in sorted(pieces):
        found.setdefault(name, [])
    for (name, offsets), values in sorted(pieces.items(), key=lambda item: item[0]):
        assert not any(offsets[1:])
        found[name].append(values)
    return {name: torch.cat(parts) for name, parts in found.items()}


def assert_matrices(stepped: Stepped, matrices: tuple[tuple[str, ...], ...]) -> None:
    """Compare a single process with the equations, and with the tensors one by one: another
    result, except that of a matrix of one tensor."""
    before, after = logical(stepped.before), logical(stepped.pieces())
    for name, expected in updated(before, matrices).items():
        assert_piece_close(name, after[name], expected, [0] * expected.dim())
    for names in matrices:
        for name, alone in updated(before, tuple((n,) for n in names)).items():
            apart = relative_error(after[name].double() - before[name], alone - before[name])
            assert (apart > 0.03) == (len(names) > 1), (name, apart)


def test_one_process_joins_what_megatron_joins():
    stepped = Stepped(MIXERS, ProcessGroupCollection.single())
    single = (block(2, "attention", "query_down"), block(2, "attention", "query_up"))
    assert_matrices(stepped, WHOLE + single)
    outputs = 5 + EXPERTS  # of five blocks; each expert has its own
    assert stepped.owned_matrices == len(WHOLE) - 1 + EXPERTS + len(single) + outputs


@pytest.mark.parametrize(
    ("split", "matrices"),
    [(True, tuple((name,) for name in QKV)), (False, (QKV,))],
    ids=["each", "together"],
)
def test_split_qkv_is_of_q_k_and_v_alone(split: bool, matrices: tuple[tuple[str, ...], ...]):
    single = ProcessGroupCollection.single()
    assert_matrices(Stepped(ATTENTION, single, split_qkv=split), matrices)
    assert_matrices(Stepped(MIXERS, single, split_qkv=split), WHOLE)


def test_all_splits_every_tensor_and_whole_splits_none():
    single = ProcessGroupCollection.single()
    each = tuple((name,) for names in WHOLE for name in names)
    assert_matrices(Stepped(MIXERS, single, split_matrices="all"), each)
    whole = Stepped(MIXERS, single, split_matrices="whole")
    assert_matrices(whole, (*WHOLE[:2], LATENT_INPUTS, *WHOLE[3:]))
    assert_matrices(Stepped(ATTENTION, single, split_matrices="whole"), (QKV,))


def test_tensor_assigned_to_adamw_leaves_its_muon_matrix():
    stepped = Stepped(MIXERS, ProcessGroupCollection.single(), adam_names=("*.alpha.weight",))
    names = tuple(name for name in WHOLE[0] if "alpha" not in name)
    assert_matrices(stepped, (names, *WHOLE[1:]))


def on_layouts(rank: int, world: int) -> list[dict]:
    torch.set_num_threads(1)
    found = []
    for degrees, strategy in LAYOUTS:
        groups = ProcessGroupCollection.create(RankGrid(world_size=world, **degrees), rank=rank)
        found.append(Stepped(MIXERS, groups, strategy=strategy).pieces())
    return found


#: Degrees of four ranks and what is sharded over data.
LAYOUTS = (
    ({"tp": 2, "etp": 1, "ep": 2}, "optim_grads_params"),
    ({"tp": 2, "gtp": 2, "etp": 2}, "no_shard"),
    ({"gtp": 2, "egtp": 2, "ep": 2}, "optim"),
)


def test_every_layout_updates_the_whole_matrices():
    before = logical(Stepped(MIXERS, ProcessGroupCollection.single()).before)
    expected = updated(before, WHOLE)
    for ranks in zip(*run_ranks(on_layouts, 4), strict=True):
        seen = dict.fromkeys(expected, 0)
        for pieces in ranks:
            for (name, offsets), values in pieces.items():
                if name in expected:
                    assert_piece_close(name, values, expected[name], offsets)
                    seen[name] += values.numel()
        assert all(count >= expected[name].numel() for name, count in seen.items())
