# SPDX-License-Identifier: Apache-2.0
"""Embedding, head and loss over vocabularies that tp does not divide, and their padding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.core.initialize import InitSpec
from megatron.core.optimizer import Optimizer, OptimizerConfig
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.tensor_parallel import VocabParallelEmbedding, VocabParallelHead
from megatron.core.tensor_parallel.vocab_parallel import vocabulary_sharding
from tests.support.closeness import assert_all_close, assert_close_by_metric
from tests.support.inputs import generator
from tests.support.nan_memory import nan_memory
from tests.support.ranks import run_ranks
from tests.unit_tests.core.tensor_parallel.sliced import (
    Side,
    assert_gradients_agree,
    own_sequence,
    padding,
    run_step,
    side,
)

S, B, H = 8, 3, 6


def build_for(vocabulary: int, *, tied: bool, multiple: int = 1):
    """Return a builder of an embedding and a head."""

    def build(store, region):
        ends = {"store": store, "region": region, "init": InitSpec.normal(0.8)}
        rows = vocabulary_sharding("table", vocabulary, H, row_multiple=multiple)
        head = vocabulary_sharding("head", vocabulary, H, row_multiple=multiple)
        return {
            "embedding": VocabParallelEmbedding(rows, **ends),
            "head": VocabParallelHead(rows if tied else head, **ends),
        }

    return build


def data(vocabulary: int):
    """Return ids (some in every slice), targets [s, b] and token weights with zeros among them."""
    spread = torch.linspace(0, vocabulary - 1, S * B).long()
    order = torch.randperm(S * B, generator=generator(1))
    ids = spread[order].view(S, B)
    targets = torch.randint(0, vocabulary, (S, B), generator=generator(2))
    weights = torch.rand(S, B, generator=generator(3)) + 0.1
    weights[order.view(S, B) % 4 == 1] = 0.0  # never all ids of one slice
    targets[0, 0], targets[0, 1] = vocabulary - 1, 0  # both ends
    return ids, targets, weights


def step(one: Side, vocabulary: int):
    """Run embedding, head and loss with backward; return hidden, loss, nll and whole logits."""
    ids, targets, weights = data(vocabulary)
    hidden = one.layers["embedding"](ids)
    loss, nll = one.layers["head"].loss(torch.tanh(hidden), targets, weights)
    run_step(one, loss)
    with torch.no_grad():
        head = one.layers["head"]
        logits = head.whole(head(torch.tanh(hidden)))
    return hidden.detach(), loss.detach(), nll, logits


def whole_step(vocabulary: int, *, tied: bool):
    """Run the single process, and hold it to autograd in fp64."""
    whole = side(ProcessGroupCollection.single(), build_for(vocabulary, tied=tied))
    results = step(whole, vocabulary)
    ids, targets, weights = data(vocabulary)
    leaves = {n: h.get().double().requires_grad_(True) for n, h in whole.store.handles.items()}
    hidden = F.embedding(ids, leaves["table"])
    logits = torch.tanh(hidden) @ leaves["table" if tied else "head"].t()
    nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(S, B)
    loss = (nll * weights).sum()
    loss.backward()
    wanted = {"hidden": hidden, "loss": loss, "nll": nll, "logits": logits}
    assert_all_close(dict(zip(wanted, results, strict=True)), wanted, bound=2e-6)
    got = {name: handle.main_grad for name, handle in whole.store.handles.items()}
    assert_all_close(got, {n: leaf.grad for n, leaf in leaves.items()}, bound=2e-6)
    return whole, results


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocabulary", [5, 101])
def test_a_single_process_equals_autograd_in_fp64(vocabulary: int, tied: bool):
    with nan_memory():
        whole_step(vocabulary, tied=tied)


def vocabulary_cases(rank: int, world: int) -> None:
    """Compare every vocabulary, multiple and kind on this rank with the single process."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    for vocabulary, multiple in ((101, 1), (101, 8), (5, 1), (5, 4)):
        for tied in (False, True):
            whole, (hidden, loss, nll, logits) = whole_step(vocabulary, tied=tied)
            for sequence_parallel in (False, True):
                parallel = side(
                    groups,
                    build_for(vocabulary, tied=tied, multiple=multiple),
                    sequence_parallel=sequence_parallel,
                )
                with nan_memory():
                    got = step(parallel, vocabulary)
                # Sums over ranks that hold nothing are exact: an embedding is bit-equal.
                assert torch.equal(got[0], own_sequence(hidden, parallel))
                for name, a, b in zip(
                    ("loss", "nll", "logits"), got[1:], (loss, nll, logits), strict=True
                ):
                    assert_close_by_metric(name, a, b, bound=2e-6)
                assert_gradients_agree(parallel, whole)
                for name, handle in parallel.store.handles.items():
                    assert not handle.main_grad[padding(parallel, name)].any(), (
                        "padding has a gradient"
                    )


@pytest.mark.parametrize("world", [2, 4])
def test_uneven_vocabularies_equal_the_single_process(world: int):
    run_ranks(vocabulary_cases, world)


def trained_padding(rank: int, world: int) -> tuple[int, list[float]]:
    """Train; return how many rows of padding this rank has, and the losses."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    found = []
    for multiple in (1, 8):
        parallel = side(groups, build_for(5, tied=True, multiple=multiple))
        config = OptimizerConfig(clip_grad=0.0)
        optimizer = Optimizer(parallel.engine.owned(), groups, config=config)
        losses = []
        for _ in range(4):
            losses.append(float(step(parallel, 5)[1]))
            optimizer.step(0.05, 0.1)
        mask = padding(parallel, "table")
        assert not parallel.store.handles["table"].get()[mask].any(), "padding has moved"
        assert optimizer.count_zeros() < 5 * H
        found.append((int(mask[:, 0].sum()), losses))
    (few, plain), (many, padded) = found
    assert many > few
    assert_close_by_metric("losses", torch.tensor(padded), torch.tensor(plain), bound=2e-6)
    assert plain[-1] < plain[0]
    return few, plain


def test_vocabulary_padding_stays_zero_and_keeps_losses():
    results = run_ranks(trained_padding, 4)
    assert [few for few, _ in results] == [0, 0, 1, 2], "the last rank holds padding only"
    assert len({tuple(losses) for _, losses in results}) == 1


def test_evaluation_computes_no_gradients():
    whole = side(ProcessGroupCollection.single(), build_for(11, tied=False))
    ids, targets, weights = data(11)
    with torch.no_grad():
        hidden = whole.layers["embedding"](ids)
        loss, _ = whole.layers["head"].loss(hidden, targets, weights)
    assert not loss.requires_grad
    assert all(handle.overwrite_main_grad for handle in whole.store.handles.values())


def test_a_loss_that_is_scaled_afterwards_scales_both_gradients():
    whole = side(ProcessGroupCollection.single(), build_for(11, tied=False))
    ids, targets, weights = data(11)
    results = []
    for factor in (1.0, -2.5):
        whole.engine.begin_step()
        hidden = whole.layers["embedding"](ids)
        loss, _ = whole.layers["head"].loss(hidden, targets, weights)
        whole.engine.backward(loss * factor, last=True)
        whole.engine.finish()
        results.append({n: h.main_grad.clone() for n, h in whole.store.handles.items()})
    assert_all_close(results[1], {n: -2.5 * g for n, g in results[0].items()}, bound=1e-6)
