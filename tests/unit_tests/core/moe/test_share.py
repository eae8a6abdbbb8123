# SPDX-License-Identifier: Apache-2.0
"""Rows of a microbatch split over tp: each row belongs to one rank, even if they do not divide."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.inference import Completion, EngineRequest, SamplingParams
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.moe import MoEConfig, RouterConfig, routers_of
from megatron.core.moe.router import MEASURES, Share
from megatron.core.tensor_parallel import TensorParallelRegion
from megatron.core.transformer import AttentionConfig, MLPConfig
from tests.support.closeness import assert_all_close, assert_close_by_metric
from tests.support.inputs import generator, one_thread
from tests.support.nan_memory import nan_memory
from tests.support.one_batch import generate
from tests.support.pretended_groups import pretended_groups
from tests.support.ranks import run_ranks
from tests.unit_tests.core.moe.single_layer import Layer, merged

H = 10
IDS = torch.tensor([31, 4, 15])
MOE = MoEConfig(
    num_experts=5,
    ffn_hidden_size=6,
    router=RouterConfig(
        topk=2, jitter=0.3, balance="seq_aux_loss", aux_loss_coeff=0.4, z_loss_coeff=0.3
    ),
    shared_ffn_hidden_size=4,
    shared_gate=True,
)
WHOLE_BALANCE = replace(MOE, router=replace(MOE.router, balance="aux_loss"))
#: s, b and whether the sequence is already split over tp.
SIZES = ((3, 1, False), (1, 1, False), (5, 3, False), (4, 3, False), (4, 3, True))


def check_local_rows(rank: int, world: int) -> None:
    """Check a rank's rows, their metadata, and that `whole` restores the microbatch."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    for s, b, scattered in SIZES:
        rows = torch.arange(s * b)
        whole = torch.randn(s, b, H, generator=generator(s, b))
        layout = SequenceLayout.of_rows(s, sample_ids=IDS[:b])
        rows_per_rank = -(-s * b // world)
        local_rows = range(rank * rows_per_rank, (rank + 1) * rows_per_rank)
        hidden = whole[rank * s // world : (rank + 1) * s // world] if scattered else whole
        share = Share(
            hidden, layout, region=TensorParallelRegion(groups["tp"], sequence_parallel=scattered)
        )
        local = share.rows(hidden)
        real_rows = [n for n in local_rows if n < s * b]
        assert share.count == len(local) == rows_per_rank
        assert torch.equal(local[: len(real_rows)], whole.flatten(0, 1)[real_rows])
        assert not local[len(real_rows) :].any()
        assert (share.real is None) == (s * b % world == 0)
        if share.real is not None:
            assert share.real.tolist() == [n < s * b for n in local_rows]
        assert share.sequences[: len(real_rows)].tolist() == (rows[real_rows] % b).tolist()
        assert share.positions[: len(real_rows)].tolist() == (rows[real_rows] // b).tolist()
        assert share.samples[: len(real_rows)].tolist() == IDS[rows[real_rows] % b].tolist()
        restored = share.whole(local * 2.0)
        assert torch.equal(restored, hidden * 2.0)


def test_each_row_belongs_to_one_rank():
    run_ranks(check_local_rows, 2)


@pytest.mark.parametrize(("s", "b"), [(5, 2), (2, 2), (7, 1), (6, 3)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_three_ranks_cover_all_rows_in_order(s: int, b: int, sequence_parallel: bool):
    if sequence_parallel and s % 3:
        s += 3 - s % 3
    layout = SequenceLayout.of_rows(s, sample_ids=IDS[:b])
    expected = [(n // b, n % b, int(IDS[n % b])) for n in range(s * b)]
    rows = []
    for rank in range(3):
        groups = pretended_groups(RankGrid(world_size=3, tp=3), rank)
        region = TensorParallelRegion(groups["tp"], sequence_parallel=sequence_parallel)
        hidden = torch.zeros(s // 3 if sequence_parallel else s, b, H)
        share = Share(hidden, layout, region=region)
        numbers = (x.tolist() for x in (share.positions, share.sequences, share.samples))
        local_rows = list(zip(*numbers, strict=True))
        assert len(local_rows) == share.count == -(-s * b // 3)
        real = share.real.tolist() if share.real is not None else [True] * share.count
        rows += [row for row, is_real in zip(local_rows, real, strict=True) if is_real]
    assert rows == expected


def check_document_padding(rank: int, world: int) -> None:
    """Check that a share marks the padding after documents."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    sharding = SequenceSharding.of(5, 1, cu_seqlens=(0, 2, 5), padded_cu_seqlens=(0, 4, 9))
    layout = SequenceLayout.make(sharding, 0, rows=3)
    hidden = torch.zeros(9, 3, H)
    share = Share(hidden, layout, region=TensorParallelRegion(groups["tp"]))
    columns = [True, True, False, False, True, True, True, False, False]
    real_rows = [real for real in columns for _ in range(3)] + [False]  # 27 rows and one more
    assert share.real.tolist() == real_rows[rank * 14 : (rank + 1) * 14]
    # Capacity counts only the 15 real tokens of 27 rows.
    assert (share.count, int(share.num_tokens)) == (14, (8, 7)[rank])


def test_document_padding_is_not_counted_as_tokens():
    run_ranks(check_document_padding, 2)


def layer_inputs(s: int, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states and factors of the output, [s, b, h]."""
    return tuple(torch.randn(s, b, H, generator=generator(s, b, i)) for i in range(2))


def run_uneven_rows(rank: int, world: int, config: MoEConfig) -> list:
    """Run the layer with rows that do not divide over ranks, all losses and jitter on."""
    grid = RankGrid(world_size=world, tp=world, etp=1, ep=world)
    groups = ProcessGroupCollection.create(grid, rank=rank)
    runs = []
    for s, b, scattered in SIZES:
        seq_slice = slice(rank * s // world, (rank + 1) * s // world) if scattered else slice(0, s)
        layout = SequenceLayout.of_rows(s, sample_ids=IDS[:b])
        hidden, factors = layer_inputs(s, b)
        for dispatcher in ("allgather", "alltoall"):
            layer = Layer(
                replace(config, num_experts=6),
                groups,
                hidden_size=H,
                sequence_parallel=scattered,
                dispatcher=dispatcher,
            )
            with nan_memory():
                out, dx = layer.step(
                    hidden[seq_slice], factors[seq_slice], layout, aux_factor=torch.tensor(3.0)
                )
            runs.append((seq_slice, out, dx, layer.gradients(), layer.moe.router.counted))
    return runs


@pytest.mark.parametrize("config", [MOE, WHOLE_BALANCE], ids=["sequences", "whole"])
def test_layers_match_one_process(config: MoEConfig):
    runs = run_ranks(run_uneven_rows, 2, config)
    for index, (s, b, _) in enumerate(size for size in SIZES for _ in range(2)):
        layout = SequenceLayout.of_rows(s, sample_ids=IDS[:b])
        with one_thread():
            single = Layer(replace(config, num_experts=6), hidden_size=H)
            single.assert_stable_routes(layer_inputs(s, b)[0], layout)
            out, dx = single.step(*layer_inputs(s, b), layout, aux_factor=torch.tensor(3.0))
            plain = Layer(
                replace(config, num_experts=6, router=replace(config.router, jitter=0.0)),
                hidden_size=H,
            )
            without_jitter, _ = plain.step(*layer_inputs(s, b), layout)
        assert (out - without_jitter).abs().max() > 1e-3 * out.abs().max(), "no jitter"
        for seq_slice, output, input_grad, _, _ in (run[index] for run in runs):
            assert_close_by_metric("output", output, out[seq_slice], bound=5e-6)
            assert_close_by_metric("input gradient", input_grad, dx[seq_slice], bound=5e-6)
        gradients = merged([shard for run in runs for shard in run[index][3]])
        expected = merged(single.gradients())
        zeros = {name for name, gradient in expected.items() if not gradient.any()}
        assert not zeros
        assert_all_close(gradients, expected, bound=5e-6)
        counted = sum(run[index][4] for run in runs)
        places = MEASURES.index("assigned") - len(MEASURES)
        assert counted[places] == 2 * s * b, "padding is counted"
        assert_close_by_metric("counted", counted, single.moe.router.counted, bound=1e-6)


GPT = GPTConfig(
    num_layers=2,
    hidden_size=24,
    vocab_size=61,
    attention=AttentionConfig(num_attention_heads=4, num_query_groups=2, kv_channels=6),
    mlp=MLPConfig(ffn_hidden_size=20),
    moe=replace(MOE, num_experts=6),
    ffn_pattern="-E",
    init_std=0.5,
)
REQUESTS = [EngineRequest(prompt=(5, 17, 2), sequence=100)]
GREEDY = SamplingParams(temperature=0)


def generate_on_rank(rank: int, world: int) -> tuple[Completion, torch.Tensor]:
    """Decode one token at a time for a single sequence."""
    grid = RankGrid(world_size=world, tp=world, etp=1, ep=world)
    model = GPTModel(GPT, ProcessGroupCollection.create(grid, rank=rank), seed=3, vocab_multiple=8)
    (completion,) = generate(model, REQUESTS, max_new_tokens=9, sampling=GREEDY)
    (router,) = routers_of(model)
    return completion, router.counted


def test_decoding_on_two_ranks_matches_one_process():
    model = GPTModel(GPT, ProcessGroupCollection.single(), seed=3)
    (expected,) = generate(model, REQUESTS, max_new_tokens=9, sampling=GREEDY)
    assert len(set(expected.tokens)) > 4
    for completion, counted in run_ranks(generate_on_rank, 2):
        assert completion.tokens == expected.tokens
        logprobs = [torch.tensor(output.logprobs) for output in (completion, expected)]
        assert (logprobs[0] - logprobs[1]).abs().max() < 1e-5
        assert not counted.any()
