# SPDX-License-Identifier: Apache-2.0
"""Layouts of a GPT over context-parallel ranks: refused inputs, and masks of documents.

`tests/parity` compares losses and gradients of every engine with one process.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.backend import LOCAL
from megatron.core.comm import trace
from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.transformer import AttentionConfig, MLPConfig, NormConfig
from tests.support.closeness import assert_all_close
from tests.support.inputs import generator, microbatch, one_thread
from tests.support.ranks import run_ranks

CONFIG = GPTConfig(
    num_layers=2,
    hidden_size=24,
    vocab_size=37,
    attention=AttentionConfig(num_attention_heads=4, num_query_groups=2, kv_channels=6),
    mlp=MLPConfig(ffn_hidden_size=20),
    norm=NormConfig(),
    init_std=0.2,
)
LENGTH, ROWS = 16, 3
DOCUMENT_BOUNDS = ((0, 5, 6, 11, 16), (0, 16), (0, 9, 16))


#: Fields of a microbatch that belong to its layout.
LAYOUT_FIELDS = ("positions", "document_ids", "sample_ids")


def batch_of(*, documents: bool) -> dict[str, torch.Tensor]:
    """Return a microbatch of whole rows, with the fields of its documents."""
    batch = microbatch(
        seed=6, dp_rank=0, index=0, batch=ROWS, sequence=LENGTH, vocabulary=CONFIG.vocab_size
    )
    fields = {
        "tokens": batch.tokens,
        "labels": batch.labels,
        "token_weights": batch.loss_mask * 0.25,
        "sample_ids": batch.sample_ids,
    }
    if documents:
        indices = torch.arange(LENGTH)
        starts = [torch.tensor(row[:-1]) for row in DOCUMENT_BOUNDS]
        ids = torch.stack([(indices[:, None] >= s).sum(1) - 1 for s in starts])
        fields["document_ids"] = ids
        fields["positions"] = torch.stack(
            [indices - s[i] for s, i in zip(starts, ids, strict=True)]
        )
    return fields


def perturb_weights(model: GPTModel) -> None:
    """Perturb every weight by the same values on every grid."""
    for handle in model.store.handles.values():
        for chunk in model.store.chunks(handle):
            noise = torch.randn(chunk.shape, generator=generator(9, *chunk.name.encode()))
            slices = chunk.box.slices
            chunk.tensor.add_(0.2 * noise[slices])


def check_refusals(rank: int, world: int) -> None:
    """Check the errors for models and layouts that do not fit two ranks."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    invalid = dataclasses.replace(CONFIG.attention, num_attention_heads=3, num_query_groups=3)
    backend = dataclasses.replace(LOCAL, context_engine="a2a")
    with pytest.raises(ValueError, match="3 query heads do not divide over 2"):
        GPTModel(dataclasses.replace(CONFIG, attention=invalid), groups, backend=backend)
    model = GPTModel(CONFIG, groups)
    batch = batch_of(documents=False)
    inputs = [batch[name] for name in ("tokens", "labels", "token_weights")]
    sharding = SequenceSharding.of(LENGTH, world)
    layout = SequenceLayout.make(sharding, rank, rows=ROWS)
    local = [layout.local(x) for x in inputs]
    with trace(groups) as records:
        with pytest.raises(ValueError, match="2 context parallel ranks need a sharded layout"):
            model.loss(*inputs)
        with pytest.raises(ValueError, match="16 tokens per row, but the layout has 8"):
            model.loss(*inputs, layout=layout)
        with pytest.raises(ValueError, match=rf"is for rank {1 - rank} of 2, but this is rank"):
            model.loss(*local, layout=SequenceLayout.make(sharding, 1 - rank, rows=ROWS))
    assert not records


def test_invalid_inputs_are_refused_before_any_collective():
    six_heads = dataclasses.replace(CONFIG.attention, num_attention_heads=6, num_query_groups=6)
    expected = "engine a2a: 3 query heads do not divide over 2 context parallel ranks: use p2p"
    assert expected in six_heads.problems(2, cp=2, engine="a2a")[0]
    assert six_heads.problems(2, cp=2, engine="p2p") == []
    assert "use auto, p2p" in CONFIG.attention.problems(1, cp=2, engine="ring")[0]
    no_window = dataclasses.replace(CONFIG.attention, window=0)
    assert no_window.problems(1) == ["attention window 0: use at least 1, or None for no window"]
    run_ranks(check_refusals, 2)


def test_documents_match_with_blockwise_attention_or_mask():
    batch = batch_of(documents=True)
    rows = {name: batch.pop(name) for name in LAYOUT_FIELDS}
    whole = SequenceLayout.of_rows(LENGTH, **rows)
    with one_thread():
        model = GPTModel(CONFIG, ProcessGroupCollection.single(), seed=5)
        perturb_weights(model)
        by_ids, by_blocks = (
            SequenceLayout.make(
                SequenceSharding.of(LENGTH, 1), 0, rows=ROWS, masks_by_ids=ids, **rows
            )
            for ids in (True, False)
        )
        with torch.no_grad():
            nll = {
                "rows": model.loss(**batch, layout=whole)[1],
                "ids": model.loss(**batch, layout=by_ids)[1],
                "blocks": model.loss(**batch, layout=by_blocks)[1],
                "none": model.loss(**batch)[1],
            }
    assert (by_ids.num_plans, by_blocks.num_plans) == (0, 1)
    assert torch.equal(nll["rows"], nll["ids"])
    assert_all_close({"nll": nll["blocks"]}, {"nll": nll["rows"]})
    assert (nll["none"] - nll["rows"]).abs().max() > 0.1


def test_layout_of_other_ranks_or_rows_is_refused():
    model = GPTModel(CONFIG, ProcessGroupCollection.single())
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    layout = SequenceLayout.make(SequenceSharding.of(2 * LENGTH, 2), 1, rows=ROWS)
    with pytest.raises(ValueError, match=r"for rank 1 of 2, but this is rank 0 of 1"):
        model(tokens, layout=layout)
    layout = SequenceLayout.make(SequenceSharding.of(LENGTH, 1), 0, rows=ROWS - 1)
    with pytest.raises(ValueError, match=r"3 rows of tokens, but the layout has 2"):
        model(tokens, layout=layout)
