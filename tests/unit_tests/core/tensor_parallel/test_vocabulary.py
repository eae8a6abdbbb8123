# SPDX-License-Identifier: Apache-2.0
"""Embedding, head and loss with vocabulary sizes that tp does not divide, and with padding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.core import InitSpec, ProcessGroupCollection, RankGrid
from megatron.core.optimizer import Optimizer, OptimizerConfig
from megatron.core.tensor_parallel import VocabParallelEmbedding, VocabParallelHead
from megatron.core.tensor_parallel.vocab_parallel import vocabulary_sharding
from tests.support.closeness import assert_all_close, assert_close_by_metric
from tests.support.inputs import generator
from tests.support.nan_memory import nan_memory
from tests.support.ranks import run_ranks
from tests.unit_tests.core.tensor_parallel.sliced import (
    ModelUnderTest,
    assert_gradients_match,
    build_model,
    local_sequence,
    padding,
    run_step,
)

S, B, H = 8, 3, 6


def build_for(vocabulary: int, *, tied: bool, multiple: int = 1):
    """Return a builder of an embedding and a head."""

    def build(store, region):
        arguments = {"store": store, "region": region, "init": InitSpec.normal(0.8)}
        table = vocabulary_sharding("table", vocabulary, H, row_multiple=multiple)
        head = vocabulary_sharding("head", vocabulary, H, row_multiple=multiple)
        return {
            "embedding": VocabParallelEmbedding(table, **arguments),
            "head": VocabParallelHead(table if tied else head, **arguments),
        }

    return build


def make_batch(vocabulary: int):
    """Return ids [s, b] of every vocabulary shard, targets [s, b] and token weights, some zero."""
    sorted_ids = torch.linspace(0, vocabulary - 1, S * B).long()
    order = torch.randperm(S * B, generator=generator(1))
    ids = sorted_ids[order].view(S, B)
    targets = torch.randint(0, vocabulary, (S, B), generator=generator(2))
    weights = torch.rand(S, B, generator=generator(3)) + 0.1
    weights[order.view(S, B) % 4 == 1] = 0.0  # never all ids of a shard
    targets[0, 0], targets[0, 1] = vocabulary - 1, 0  # the last and the first id
    return ids, targets, weights


def step(model: ModelUnderTest, vocabulary: int):
    """Run forward and backward; return hidden, loss, nll and the logits of the full vocabulary."""
    ids, targets, weights = make_batch(vocabulary)
    hidden = model.layers["embedding"](ids)
    loss, nll = model.layers["head"].loss(torch.tanh(hidden), targets, weights)
    run_step(model, loss)
    with torch.no_grad():
        head = model.layers["head"]
        logits = head.whole(head(torch.tanh(hidden)))
    return hidden.detach(), loss.detach(), nll, logits


def single_process_step(vocabulary: int, *, tied: bool):
    """Run a step in a single process and compare it with autograd in fp64."""
    single = build_model(ProcessGroupCollection.single(), build_for(vocabulary, tied=tied))
    outputs = step(single, vocabulary)
    ids, targets, weights = make_batch(vocabulary)
    leaves = {n: h.get().double().requires_grad_(True) for n, h in single.store.handles.items()}
    hidden = F.embedding(ids, leaves["table"])
    logits = torch.tanh(hidden) @ leaves["table" if tied else "head"].t()
    nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(S, B)
    loss = (nll * weights).sum()
    loss.backward()
    expected = {"hidden": hidden, "loss": loss, "nll": nll, "logits": logits}
    assert_all_close(dict(zip(expected, outputs, strict=True)), expected, bound=2e-6)
    grads = {name: handle.main_grad for name, handle in single.store.handles.items()}
    assert_all_close(grads, {n: leaf.grad for n, leaf in leaves.items()}, bound=2e-6)
    return single, outputs


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocabulary", [5, 101])
def test_single_process_matches_autograd_in_fp64(vocabulary: int, tied: bool):
    with nan_memory():
        single_process_step(vocabulary, tied=tied)


def check_vocabularies(rank: int, world: int) -> None:
    """Compare every vocabulary size, row multiple and tying with the single process."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    for vocabulary, multiple in ((101, 1), (101, 8), (5, 1), (5, 4)):
        for tied in (False, True):
            single, (hidden, loss, nll, logits) = single_process_step(vocabulary, tied=tied)
            for sequence_parallel in (False, True):
                parallel = build_model(
                    groups,
                    build_for(vocabulary, tied=tied, multiple=multiple),
                    sequence_parallel=sequence_parallel,
                )
                with nan_memory():
                    outputs = step(parallel, vocabulary)
                # Ranks without the id contribute exact zeros, so the embedding is bitwise equal.
                assert torch.equal(outputs[0], local_sequence(hidden, parallel))
                for name, actual, expected in zip(
                    ("loss", "nll", "logits"), outputs[1:], (loss, nll, logits), strict=True
                ):
                    assert_close_by_metric(name, actual, expected, bound=2e-6)
                assert_gradients_match(parallel, single)
                for name, handle in parallel.store.handles.items():
                    assert not handle.main_grad[padding(parallel, name)].any(), (
                        "padding has a gradient"
                    )


@pytest.mark.parametrize("world", [2, 4])
def test_uneven_vocabularies_match_single_process(world: int):
    run_ranks(check_vocabularies, world)


def train_with_padding(rank: int, world: int) -> tuple[int, list[float]]:
    """Train with and without extra padding; return the padding rows of this rank and the losses."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    runs = []
    for multiple in (1, 8):
        parallel = build_model(groups, build_for(5, tied=True, multiple=multiple))
        config = OptimizerConfig(clip_grad=0.0)
        optimizer = Optimizer(parallel.engine.owned(), groups, config=config)
        losses = []
        for _ in range(4):
            losses.append(float(step(parallel, 5)[1]))
            optimizer.step(0.05, 0.1)
        mask = padding(parallel, "table")
        assert not parallel.store.handles["table"].get()[mask].any(), "padding was updated"
        assert optimizer.count_zeros() < 5 * H
        runs.append((int(mask[:, 0].sum()), losses))
    (num_rows, losses), (num_rows_padded, padded_losses) = runs
    assert num_rows_padded > num_rows
    assert_close_by_metric("losses", torch.tensor(padded_losses), torch.tensor(losses), bound=2e-6)
    assert losses[-1] < losses[0]
    return num_rows, losses


def test_vocabulary_padding_stays_zero_and_preserves_losses():
    runs = run_ranks(train_with_padding, 4)
    assert [num_rows for num_rows, _ in runs] == [0, 0, 1, 2], "the last rank holds padding only"
    assert len({tuple(losses) for _, losses in runs}) == 1


def test_evaluation_computes_no_gradients():
    single = build_model(ProcessGroupCollection.single(), build_for(11, tied=False))
    ids, targets, weights = make_batch(11)
    with torch.no_grad():
        hidden = single.layers["embedding"](ids)
        loss, _ = single.layers["head"].loss(hidden, targets, weights)
    assert not loss.requires_grad
    assert all(handle.overwrite_main_grad for handle in single.store.handles.values())


def test_scaled_loss_scales_both_weight_gradients():
    single = build_model(ProcessGroupCollection.single(), build_for(11, tied=False))
    ids, targets, weights = make_batch(11)
    grads_by_factor = []
    for factor in (1.0, -2.5):
        single.engine.begin_step()
        hidden = single.layers["embedding"](ids)
        loss, _ = single.layers["head"].loss(hidden, targets, weights)
        single.engine.backward(loss * factor, last=True)
        single.engine.finish()
        grads_by_factor.append({n: h.main_grad.clone() for n, h in single.store.handles.items()})
    assert_all_close(
        grads_by_factor[1], {n: -2.5 * g for n, g in grads_by_factor[0].items()}, bound=1e-6
    )
