# SPDX-License-Identifier: Apache-2.0
"""Several documents in a row: each as if it were alone, on one process and tensor parallel."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F

from megatron.core.backend import LOCAL
from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.transformer import AttentionConfig, MLPConfig
from tests.support.inputs import generator
from tests.support.ranks import run_ranks

CONFIG = GPTConfig(
    num_layers=2,
    hidden_size=24,
    vocab_size=37,
    attention=AttentionConfig(num_attention_heads=4, num_query_groups=2, kv_channels=8),
    mlp=MLPConfig(ffn_hidden_size=20),
    init_std=0.3,
)
DROPPING = dataclasses.replace(
    CONFIG,
    hidden_dropout=0.2,
    attention=dataclasses.replace(CONFIG.attention, dropout=0.3),
)
#: Borders of the documents in each of three rows of 14.
BORDERS = [[0, 5, 6, 11, 14], [0, 14], [0, 7, 14]]

#: Row, first token and end of each.
DOCUMENTS = [(row, *span) for row, ends in enumerate(BORDERS) for span in itertools.pairwise(ends)]


def cut_of(cp: int) -> SequenceSharding:
    """Return rows of 14 cut in zigzag order, padded to 16 for two ranks."""
    padded = None if cp == 1 else (0, 16)
    return SequenceSharding.of(14, cp, cu_seqlens=(0, 14), padded_cu_seqlens=padded)


def model_of(config: GPTConfig, groups: ProcessGroupCollection, **options) -> GPTModel:
    return GPTModel(config, groups, seed=3, dtype=torch.float64, **options)


def packed() -> dict[str, torch.Tensor]:
    """Return tokens, labels and weights [3, 14], and the layout that masks documents."""
    text = torch.randint(0, 37, (3, 15), generator=generator(8))
    text[2, 7:14] = text[2, :7]  # one document twice
    positions, documents = torch.zeros(3, 14).long(), torch.zeros(3, 14, dtype=torch.int32)
    for row, borders in enumerate(BORDERS):
        for number, (first, last) in enumerate(itertools.pairwise(borders)):
            positions[row, first:last] = torch.arange(last - first)
            documents[row, first:last] = number
    return {
        "tokens": text[:, :-1].contiguous(),
        "labels": text[:, 1:].contiguous(),
        "token_weights": torch.rand(3, 14, generator=generator(9)),
        "layout": SequenceLayout.of_rows(14, positions=positions, document_ids=documents),
    }


def dropping(batch: dict, first: int) -> dict:
    """Return a batch of samples from this number on, of which dropout is a function."""
    return {**batch, "layout": batch["layout"].with_samples(torch.arange(3) + first)}


def test_documents_in_a_row_are_as_documents_alone():
    model = model_of(CONFIG, ProcessGroupCollection.single())
    batch = packed()
    with torch.no_grad():
        _, nll = model.loss(**batch)
        alone = torch.zeros_like(nll)
        for row, borders in enumerate(BORDERS):
            for first, last in itertools.pairwise(borders):
                part = [batch[k][row : row + 1, first:last] for k in ("tokens", "labels")]
                weights = torch.ones(1, last - first)
                alone[row, first:last] = model.loss(*part, weights)[1]
        dense = model.loss(batch["tokens"], batch["labels"], batch["token_weights"])[1]
    torch.testing.assert_close(nll, alone, rtol=1e-6, atol=1e-6)  # rounded to fp32
    assert (dense - alone).abs().max() > 0.1


def test_another_document_changes_no_bit_of_the_others():
    model = model_of(CONFIG, ProcessGroupCollection.single())
    batch = packed()
    changed = {**batch, "tokens": batch["tokens"].clone()}
    changed["tokens"][0, 6:11] = (changed["tokens"][0, 6:11] + 1) % 37
    with torch.no_grad():
        before, after = (model.loss(**b)[1] for b in (batch, changed))
    same = before == after
    assert not same[0, 6:11].any()
    same[0, 6:11] = True
    assert same.all()


def _after_changes(rank: int, world: int, engines: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Return the nll of this rank's tokens, by engine: [1 + documents, b, s/cp], as the batch is
    and with the tokens of one document after the other changed."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    batch = packed()
    whole = batch.pop("layout")
    known = {"positions": whole.positions.t(), "document_ids": whole.document_ids.t()}
    layout = SequenceLayout.make(cut_of(world), rank, rows=3, **known)
    labels, weights = (layout.local(batch[name]) for name in ("labels", "token_weights"))
    found = {}
    for engine in engines:
        backend = dataclasses.replace(LOCAL, context_engine=engine)
        model = GPTModel(CONFIG, groups, seed=3, backend=backend)
        nll = []
        for row, first, last in [(0, 0, 0), *DOCUMENTS]:
            tokens = batch["tokens"].clone()
            tokens[row, first:last] = (tokens[row, first:last] + 1) % 37
            with torch.no_grad():
                loss = model.loss(layout.local(tokens), labels, weights, layout=layout)
            nll.append(loss[1])
        found[engine] = torch.stack(nll)
    # Attention went by blocks: of each rank's keys in the ring, of all in each other engine.
    assert layout.num_plans == (world + 2 if world > 1 else 1)
    return found


@pytest.mark.parametrize("cp", [1, 2])
def test_a_document_changes_no_bit_of_another_on_any_engine(cp):
    engines = ("p2p", "all_gather", "a2a") if cp > 1 else ("auto",)
    ranks = run_ranks(_after_changes, cp, engines)
    for engine in engines:
        whole = torch.full((1 + len(DOCUMENTS), 3, 14), torch.nan)
        for rank, found in enumerate(ranks):
            places = torch.tensor(cut_of(cp).row_indices(rank))
            whole[:, :, places[places >= 0]] = found[engine][:, :, places >= 0]
        assert whole.isfinite().all()
        for after, (row, first, last) in zip(whole[1:], DOCUMENTS, strict=True):
            same = after == whole[0]
            assert not same[row, first:last].any()
            same[row, first:last] = True
            assert same.all(), f"{engine}: document {first} to {last} of row {row}"


def test_positions_reach_the_rotation_without_a_mask_too():
    """Under a mask only differences of positions count, so this needs the documents to meet."""
    model = model_of(CONFIG, ProcessGroupCollection.single())
    batch = packed()
    layout = SequenceLayout(batch.pop("layout").positions)
    with torch.no_grad():
        _, nll = model.loss(**batch, layout=layout)
        logits = model.full_logits(batch["tokens"], layout=layout)  # [s, b, V]
        wanted = F.cross_entropy(
            logits.float().flatten(0, 1), batch["labels"].t().flatten(), reduction="none"
        ).view(14, 3)
        plain = model.loss(**batch)[1]
    torch.testing.assert_close(nll, wanted.t(), rtol=1e-5, atol=1e-5)
    assert (plain - nll).abs().max() > 1e-2


def test_dropout_differs_between_equal_documents_of_a_row():
    model = model_of(
        dataclasses.replace(CONFIG, hidden_dropout=0.2), ProcessGroupCollection.single()
    )
    batch = packed()
    with torch.no_grad():
        _, plain = model.loss(**batch)
        _, dropped = model.loss(**dropping(batch, 0))
    torch.testing.assert_close(plain[2, :6], plain[2, 7:13], rtol=1e-6, atol=1e-6)
    above = bool(((dropped[2, :6] - dropped[2, 7:13]).abs() > 1e-6).all())
    assert above


def _tensor_parallel(rank: int, world: int, sequence_parallel: bool) -> torch.Tensor:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    model = model_of(DROPPING, groups, sequence_parallel=sequence_parallel)
    with torch.no_grad():
        return model.loss(**dropping(packed(), 5))[1]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks_agree_with_one_process(sequence_parallel):
    one = model_of(DROPPING, ProcessGroupCollection.single())
    with torch.no_grad():
        _, wanted = one.loss(**dropping(packed(), 5))
    for found in run_ranks(_tensor_parallel, 2, sequence_parallel):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
