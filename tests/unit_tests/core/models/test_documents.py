# SPDX-License-Identifier: Apache-2.0
"""Several documents per row: each behaves as if alone, on one process and on parallel ranks."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.backend import LOCAL
from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.models import GPTConfig, GPTModel
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
#: Bounds of the documents in each of three rows of 14 tokens.
DOCUMENT_BOUNDS = [[0, 5, 6, 11, 14], [0, 14], [0, 7, 14]]

#: (row, start, end) of each document.
DOCUMENTS = [
    (row, *span) for row, ends in enumerate(DOCUMENT_BOUNDS) for span in itertools.pairwise(ends)
]


def sharding_of(cp: int) -> SequenceSharding:
    """Return the zigzag sharding of rows of 14, padded to 16 for two ranks."""
    padded = None if cp == 1 else (0, 16)
    return SequenceSharding.of(14, cp, cu_seqlens=(0, 14), padded_cu_seqlens=padded)


def model_of(config: GPTConfig, groups: ProcessGroupCollection, **options) -> GPTModel:
    return GPTModel(config, groups, seed=3, dtype=torch.float64, **options)


def packed_batch() -> dict[str, torch.Tensor]:
    """Return tokens, labels and weights [3, 14], and the layout of the documents."""
    text = torch.randint(0, 37, (3, 15), generator=generator(8))
    text[2, 7:14] = text[2, :7]  # the same document twice
    positions, documents = torch.zeros(3, 14).long(), torch.zeros(3, 14, dtype=torch.int32)
    for row, bounds in enumerate(DOCUMENT_BOUNDS):
        for document, (start, end) in enumerate(itertools.pairwise(bounds)):
            positions[row, start:end] = torch.arange(end - start)
            documents[row, start:end] = document
    return {
        "tokens": text[:, :-1].contiguous(),
        "labels": text[:, 1:].contiguous(),
        "token_weights": torch.rand(3, 14, generator=generator(9)),
        "layout": SequenceLayout.of_rows(14, positions=positions, document_ids=documents),
    }


def with_samples_from(batch: dict, start: int) -> dict:
    """Return a batch with sample ids from `start` on, which determine dropout."""
    return {**batch, "layout": batch["layout"].with_samples(torch.arange(3) + start)}


def test_packed_documents_match_separate_documents():
    model = model_of(CONFIG, ProcessGroupCollection.single())
    batch = packed_batch()
    with torch.no_grad():
        _, nll = model.loss(**batch)
        separate = torch.zeros_like(nll)
        for row, bounds in enumerate(DOCUMENT_BOUNDS):
            for start, end in itertools.pairwise(bounds):
                document = [batch[k][row : row + 1, start:end] for k in ("tokens", "labels")]
                weights = torch.ones(1, end - start)
                separate[row, start:end] = model.loss(*document, weights)[1]
        dense = model.loss(batch["tokens"], batch["labels"], batch["token_weights"])[1]
    torch.testing.assert_close(nll, separate, rtol=1e-6, atol=1e-6)  # rounded to fp32
    assert (dense - separate).abs().max() > 0.1


def test_changed_document_leaves_other_documents_bit_identical():
    model = model_of(CONFIG, ProcessGroupCollection.single())
    batch = packed_batch()
    changed = {**batch, "tokens": batch["tokens"].clone()}
    changed["tokens"][0, 6:11] = (changed["tokens"][0, 6:11] + 1) % 37
    with torch.no_grad():
        before, after = (model.loss(**b)[1] for b in (batch, changed))
    same = before == after
    assert not same[0, 6:11].any()
    same[0, 6:11] = True
    assert same.all()


def _nll_after_changes(rank: int, world: int, engines: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Return the nll of this rank's tokens by engine, [1 + documents, b, s/cp].

    The first entry is of the original batch; in each other entry one document's tokens are changed.
    """
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    batch = packed_batch()
    row_layout = batch.pop("layout")
    fields = {"positions": row_layout.positions.t(), "document_ids": row_layout.document_ids.t()}
    layout = SequenceLayout.make(sharding_of(world), rank, rows=3, **fields)
    labels, weights = (layout.local(batch[name]) for name in ("labels", "token_weights"))
    nll_of_engine = {}
    for engine in engines:
        backend = dataclasses.replace(LOCAL, context_engine=engine)
        model = GPTModel(CONFIG, groups, seed=3, backend=backend)
        nll = []
        for row, start, end in [(0, 0, 0), *DOCUMENTS]:
            tokens = batch["tokens"].clone()
            tokens[row, start:end] = (tokens[row, start:end] + 1) % 37
            with torch.no_grad():
                loss = model.loss(layout.local(tokens), labels, weights, layout=layout)
            nll.append(loss[1])
        nll_of_engine[engine] = torch.stack(nll)
    # Attention is blockwise: one plan per rank's keys in the ring, one in each other engine.
    assert layout.num_plans == (world + 2 if world > 1 else 1)
    return nll_of_engine


@pytest.mark.parametrize("cp", [1, 2])
def test_documents_are_independent_on_every_cp_engine(cp):
    engines = ("p2p", "all_gather", "a2a") if cp > 1 else ("auto",)
    ranks = run_ranks(_nll_after_changes, cp, engines)
    for engine in engines:
        whole = torch.full((1 + len(DOCUMENTS), 3, 14), torch.nan)
        for rank, outputs in enumerate(ranks):
            positions = torch.tensor(sharding_of(cp).row_indices(rank))
            whole[:, :, positions[positions >= 0]] = outputs[engine][:, :, positions >= 0]
        assert whole.isfinite().all()
        for after, (row, start, end) in zip(whole[1:], DOCUMENTS, strict=True):
            same = after == whole[0]
            assert not same[row, start:end].any()
            same[row, start:end] = True
            assert same.all(), f"{engine}: document {start} to {end} of row {row}"


def test_positions_reach_rope_without_a_document_mask():
    """A document mask leaves only position differences, so here documents attend to each other."""
    model = model_of(CONFIG, ProcessGroupCollection.single())
    batch = packed_batch()
    layout = SequenceLayout(batch.pop("layout").positions)
    with torch.no_grad():
        _, nll = model.loss(**batch, layout=layout)
        logits = model.full_logits(batch["tokens"], layout=layout)  # [s, b, V]
        expected = F.cross_entropy(
            logits.float().flatten(0, 1), batch["labels"].t().flatten(), reduction="none"
        ).view(14, 3)
        plain = model.loss(**batch)[1]
    torch.testing.assert_close(nll, expected.t(), rtol=1e-5, atol=1e-5)
    assert (plain - nll).abs().max() > 1e-2


def test_dropout_differs_between_equal_documents_of_a_row():
    model = model_of(
        dataclasses.replace(CONFIG, hidden_dropout=0.2), ProcessGroupCollection.single()
    )
    batch = packed_batch()
    with torch.no_grad():
        _, plain = model.loss(**batch)
        _, dropped = model.loss(**with_samples_from(batch, 0))
    torch.testing.assert_close(plain[2, :6], plain[2, 7:13], rtol=1e-6, atol=1e-6)
    above = bool(((dropped[2, :6] - dropped[2, 7:13]).abs() > 1e-6).all())
    assert above
