# SPDX-License-Identifier: Apache-2.0
"""Rows of a microbatch over tp: every row is one rank's, also where they do not divide."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.inference.engine import Completion, Request
from megatron.core.inference.sampling import SamplingParams
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.moe import MoEConfig, RouterConfig, routers_of
from megatron.core.moe.router import MEASURES, Share
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
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
#: s, b and whether the sequence is cut over tp already.
SIZES = ((3, 1, False), (1, 1, False), (5, 3, False), (4, 3, False), (4, 3, True))


def one_by_one(rank: int, world: int) -> None:
    """See which rows a rank gets, what it knows of them, and that all come back."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    for s, b, scattered in SIZES:
        rows = torch.arange(s * b)
        whole = torch.randn(s, b, H, generator=generator(s, b))
        layout = SequenceLayout.of_rows(s, sample_ids=IDS[:b])
        each = -(-s * b // world)
        mine = range(rank * each, (rank + 1) * each)
        hidden = whole[rank * s // world : (rank + 1) * s // world] if scattered else whole
        share = Share(
            hidden, layout, region=TensorParallelRegion(groups["tp"], sequence_parallel=scattered)
        )
        got = share.rows(hidden)
        there = [n for n in mine if n < s * b]
        assert share.count == len(got) == each
        assert torch.equal(got[: len(there)], whole.flatten(0, 1)[there])
        assert not got[len(there) :].any()
        assert (share.real is None) == (s * b % world == 0)
        if share.real is not None:
            assert share.real.tolist() == [n < s * b for n in mine]
        assert share.sequences[: len(there)].tolist() == (rows[there] % b).tolist()
        assert share.positions[: len(there)].tolist() == (rows[there] // b).tolist()
        assert share.samples[: len(there)].tolist() == IDS[rows[there] % b].tolist()
        back = share.whole(got * 2.0)
        assert torch.equal(back, hidden * 2.0)


def test_every_row_is_one_ranks():
    run_ranks(one_by_one, 2)


@pytest.mark.parametrize(("s", "b"), [(5, 2), (2, 2), (7, 1), (6, 3)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_three_ranks_number_the_rows_of_a_microbatch(s: int, b: int, sequence_parallel: bool):
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
        found = list(zip(*numbers, strict=True))
        assert len(found) == share.count == -(-s * b // 3)
        real = share.real.tolist() if share.real is not None else [True] * share.count
        rows += [row for row, is_real in zip(found, real, strict=True) if is_real]
    assert rows == expected


def padded(rank: int, world: int) -> None:
    """See that padding behind documents is known."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    cut = SequenceSharding.of(5, 1, cu_seqlens=(0, 2, 5), padded_cu_seqlens=(0, 4, 9))
    layout = SequenceLayout.make(cut, 0, rows=3)
    hidden = torch.zeros(9, 3, H)
    share = Share(hidden, layout, region=TensorParallelRegion(groups["tp"]))
    columns = [True, True, False, False, True, True, True, False, False]
    every = [real for real in columns for _ in range(3)] + [False]  # 27 rows and one more
    assert share.real.tolist() == every[rank * 14 : (rank + 1) * 14]
    # Experts have the room of what counts: 15 of 27 rows.
    assert (share.count, int(share.num_tokens)) == (14, (8, 7)[rank])


def test_padding_of_documents_is_none_of_the_rows():
    run_ranks(padded, 2)


def data(s: int, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(s, b, H, generator=generator(s, b, i)) for i in range(2))


def divided(rank: int, world: int, config: MoEConfig) -> list:
    """Run the layer with tokens that do not divide, all losses and jitter on."""
    grid = RankGrid(world_size=world, tp=world, etp=1, ep=world)
    groups = ProcessGroupCollection.create(grid, rank=rank)
    found = []
    for s, b, scattered in SIZES:
        part = slice(rank * s // world, (rank + 1) * s // world) if scattered else slice(0, s)
        layout = SequenceLayout.of_rows(s, sample_ids=IDS[:b])
        hidden, factors = data(s, b)
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
                    hidden[part], factors[part], layout, aux_factor=torch.tensor(3.0)
                )
            found.append((part, out, dx, layer.gradients(), layer.moe.router.counted))
    return found


@pytest.mark.parametrize("config", [MOE, WHOLE_BALANCE], ids=["sequences", "whole"])
def test_layers_equal_one_process(config: MoEConfig):
    runs = run_ranks(divided, 2, config)
    for number, (s, b, _) in enumerate(size for size in SIZES for _ in range(2)):
        layout = SequenceLayout.of_rows(s, sample_ids=IDS[:b])
        with one_thread():
            alone = Layer(replace(config, num_experts=6), hidden_size=H)
            alone.assert_sure(data(s, b)[0], layout)
            out, dx = alone.step(*data(s, b), layout, aux_factor=torch.tensor(3.0))
            plain = Layer(
                replace(config, num_experts=6, router=replace(config.router, jitter=0.0)),
                hidden_size=H,
            )
            still, _ = plain.step(*data(s, b), layout)
        assert (out - still).abs().max() > 1e-3 * out.abs().max(), "no jitter"
        for part, got, back, _, _ in (run[number] for run in runs):
            assert_close_by_metric("output", got, out[part], bound=5e-6)
            assert_close_by_metric("input gradient", back, dx[part], bound=5e-6)
        found = merged([piece for run in runs for piece in run[number][3]])
        wanted = merged(alone.gradients())
        zeros = {name for name, gradient in wanted.items() if not gradient.any()}
        assert not zeros
        assert_all_close(found, wanted, bound=5e-6)
        counted = sum(run[number][4] for run in runs)
        places = MEASURES.index("places") - len(MEASURES)
        assert counted[places] == 2 * s * b, "padding counts"
        assert_close_by_metric("counted", counted, alone.moe.router.counted, bound=1e-6)


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
REQUESTS = [Request(prompt=(5, 17, 2), sequence=100)]
GREEDY = SamplingParams(temperature=0)


def generated(rank: int, world: int) -> tuple[Completion, torch.Tensor]:
    """Generate one token after the other for a single sequence."""
    grid = RankGrid(world_size=world, tp=world, etp=1, ep=world)
    model = GPTModel(GPT, ProcessGroupCollection.create(grid, rank=rank), seed=3, vocab_multiple=8)
    (found,) = generate(model, REQUESTS, max_new_tokens=9, sampling=GREEDY)
    (router,) = routers_of(model)
    return found, router.counted


def test_one_token_at_a_time_on_two_ranks():
    model = GPTModel(GPT, ProcessGroupCollection.single(), seed=3)
    (wanted,) = generate(model, REQUESTS, max_new_tokens=9, sampling=GREEDY)
    assert len(set(wanted.tokens)) > 4
    for got, counted in run_ranks(generated, 2):
        assert got.tokens == wanted.tokens
        logprobs = [torch.tensor(done.logprobs) for done in (got, wanted)]
        assert (logprobs[0] - logprobs[1]).abs().max() < 1e-5
        assert not counted.any()
