# SPDX-License-Identifier: Apache-2.0
"""A GPT with latent attention over tp, sequence and context parallel ranks against one process."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.backend import LOCAL
from megatron.core.comm import trace
from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.distributed import DataParallel
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.transformer import LatentAttentionConfig, MLPConfig, Recompute, RopeConfig
from tests.support.activation import assert_active
from tests.support.closeness import assert_all_close, assert_piece_close
from tests.support.inputs import generator, microbatch, one_thread
from tests.support.nan_memory import nan_memory
from tests.support.ranks import run_ranks

CONFIG = GPTConfig(
    num_layers=2,
    hidden_size=22,
    vocab_size=37,
    attention=LatentAttentionConfig(
        num_attention_heads=4,
        q_lora_rank=14,
        kv_lora_rank=9,
        nope_channels=5,
        rope_channels=6,
        value_channels=7,
        dropout=0.2,
        scale_factor=1.3,
    ),
    mlp=MLPConfig(ffn_hidden_size=20),
    rope=RopeConfig(base=200.0, interleaved=True),
    init_std=0.2,
)
LENGTH, ROWS = 16, 3
DOCUMENT_BOUNDS = ((0, 5, 6, 11, 16), (0, 16), (0, 9, 16))
FULL = Recompute(granularity="full", method="uniform", num_layers=1)
SELECTIVE = Recompute(granularity="selective")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a grid of ranks.

    Args:
        low: whether queries pass through a low-rank projection.
        split: compute weight gradients after all others, as schedules with split backwards do.
    """

    tp: int = 1
    cp: int = 1
    engine: str = "auto"
    low: bool = True
    documents: bool = False
    sequence_parallel: bool = False
    split: bool = False
    recompute: Recompute | None = None

    @property
    def config(self) -> GPTConfig:
        rank = CONFIG.attention.q_lora_rank if self.low else None
        attention = dataclasses.replace(CONFIG.attention, q_lora_rank=rank)
        return dataclasses.replace(CONFIG, attention=attention)


#: Fields of a microbatch that belong to its layout.
LAYOUT_FIELDS = ("positions", "document_ids", "sample_ids")


def batch_of(case: Case, index: int) -> dict[str, torch.Tensor]:
    """Return a microbatch of whole rows, with the fields of its documents."""
    batch = microbatch(
        seed=6, dp_rank=0, index=index, batch=ROWS, sequence=LENGTH, vocabulary=CONFIG.vocab_size
    )
    fields = {
        "tokens": batch.tokens,
        "labels": batch.labels,
        "token_weights": batch.loss_mask * 0.25,
        "sample_ids": batch.sample_ids,
    }
    if case.documents:
        indices = torch.arange(LENGTH)
        starts = [torch.tensor(row[:-1]) for row in DOCUMENT_BOUNDS]
        ids = torch.stack([(indices[:, None] >= s).sum(1) - 1 for s in starts])
        fields["document_ids"] = ids
        fields["positions"] = torch.stack(
            [indices - s[i] for s, i in zip(starts, ids, strict=True)]
        )
    return fields


def build_model(case: Case, groups: ProcessGroupCollection) -> GPTModel:
    """Return the model, with weights perturbed by the same values on every grid."""
    backend = dataclasses.replace(LOCAL, context_engine=case.engine)
    model = GPTModel(
        case.config, groups, sequence_parallel=case.sequence_parallel, seed=5, backend=backend
    )
    model.set_recompute(case.recompute or Recompute())
    model.store.splits = case.split
    for handle in model.store.handles.values():
        for chunk in model.store.chunks(handle):
            noise = torch.randn(chunk.shape, generator=generator(9, *chunk.name.encode()))
            slices = chunk.box.slices
            chunk.tensor.add_(0.2 * noise[slices])
    return model


def train_step(case: Case, groups: ProcessGroupCollection):
    """Return each nll, gradient shards, collectives and the deferrals per weight of a step.

    The step has two microbatches.
    """
    model = build_model(case, groups)
    engine = DataParallel(model.store, groups)
    nlls, num_deferred = [], 0
    engine.begin_step()
    with nan_memory(), trace(groups) as records:
        for index in range(2):
            batch = batch_of(case, index)
            layout_fields = {name: batch.pop(name) for name in LAYOUT_FIELDS if name in batch}
            layout = SequenceLayout.of_rows(LENGTH, **layout_fields)
            if case.cp > 1 and groups["cp"].size > 1:
                sharding = SequenceSharding.of(LENGTH, case.cp)
                layout = SequenceLayout.make(
                    sharding, groups["cp"].rank, rows=ROWS, **layout_fields
                )
            loss, nll = model.loss(*(layout.local(x) for x in batch.values()), layout=layout)
            with model.store.defer() if case.split else contextlib.nullcontext() as queue:
                engine.backward(loss, last=index == 1)
            if queue is not None:
                num_deferred += len(queue)
                queue.drain()
            nlls.append(nll.detach())
        engine.finish()
    gradients = {}
    for handle in model.store.handles.values():
        flat = handle.main_grad.view(-1)
        for box in model.store.boxes(handle):
            values = flat[box.start : box.start + box.numel].view(box.sizes).clone()
            gradients[box.name, box.offsets] = values
    return nlls, gradients, list(records), num_deferred / len(model.store.handles)


def on_rank(rank: int, world: int, cases: list[Case]) -> list:
    """Train every case on the ranks of its grid."""
    outputs = []
    for case in cases:
        grid = RankGrid(world_size=world, tp=case.tp, cp=case.cp)
        groups = ProcessGroupCollection.create(grid, rank=rank)
        outputs.append((groups["cp"].rank, train_step(case, groups)))
    return outputs


TWO_RANKS = {
    "tp": Case(tp=2, documents=True),
    "tp, direct": Case(tp=2, low=False, split=True),
    "sequence": Case(tp=2, sequence_parallel=True, documents=True, recompute=FULL),
    "sequence, direct": Case(tp=2, sequence_parallel=True, low=False, recompute=SELECTIVE),
    "sequence, split": Case(tp=2, sequence_parallel=True, split=True, recompute=SELECTIVE),
    "p2p": Case(cp=2, engine="p2p", documents=True),
    "all_gather": Case(cp=2, engine="all_gather", recompute=FULL),
    "a2a": Case(cp=2, engine="a2a", documents=True, low=False),
}
FOUR_RANKS = {
    "sequence, a2a": Case(tp=2, cp=2, engine="a2a", sequence_parallel=True, documents=True)
}
KINDS = {"p2p": "send", "all_gather": "all_gather", "a2a": "all_to_all"}


@pytest.mark.parametrize(("world", "cases"), [(2, TWO_RANKS), (4, FOUR_RANKS)], ids=["two", "four"])
def test_gradients_match_one_process(world: int, cases: dict[str, Case]):
    outputs = run_ranks(on_rank, world, list(cases.values()))
    for index, (name, case) in enumerate(cases.items()):
        with one_thread():
            plain = dataclasses.replace(case, recompute=None, split=False)
            expected, gradients, _, _ = train_step(plain, ProcessGroupCollection.single())
        for rank_outputs in outputs:
            _check(name, case, rank_outputs[index], expected, gradients)


def _check(name: str, case: Case, output, expected, gradients) -> None:
    cp_rank, (nlls, shards, records, deferrals) = output
    positions = torch.tensor(SequenceSharding.of(LENGTH, case.cp).row_indices(cp_rank))
    got = {f"nll {index}": nll for index, nll in enumerate(nlls)}
    assert_all_close(got, {f"nll {index}": nll[:, positions] for index, nll in enumerate(expected)})
    assert {weight for weight, _ in shards} == {weight for weight, _ in gradients}
    for (weight, offsets), values in shards.items():
        whole = gradients[weight, (0,) * len(offsets)]
        assert_piece_close(f"{name}: {weight}", values, whole, offsets)
    if case.cp > 1:
        assert_active(records, kind=KINDS[case.engine], group="cp")
    if case.tp > 1:
        assert_active(
            records, kind="reduce_scatter" if case.sequence_parallel else "all_reduce", group="tp"
        )
    assert deferrals == (2 if case.split else 0), (name, deferrals)


def test_dropout_documents_and_scale_are_active():
    """Each feature changes the losses, so the tests above compare models that use them."""
    single = ProcessGroupCollection.single()
    with one_thread(), torch.no_grad():
        model, batch = build_model(Case(), single), batch_of(Case(documents=True), 0)
        plain = dataclasses.replace(
            CONFIG, attention=dataclasses.replace(CONFIG.attention, scale_factor=1.0)
        )
        unscaled = GPTModel(plain, single)
        for name, handle in unscaled.store.handles.items():
            handle.get().copy_(model.store.handles[name].get())
        rows = {name: batch.pop(name) for name in LAYOUT_FIELDS}
        layout = SequenceLayout.of_rows(LENGTH, **rows)
        full = model.loss(**batch, layout=layout)[1]

        def changed(**values: object) -> torch.Tensor:
            return model.loss(**batch, layout=SequenceLayout.of_rows(LENGTH, **rows | values))[1]

        without = {
            "scale": unscaled.loss(**batch, layout=layout)[1],
            "dropout": changed(sample_ids=None),
            "documents": changed(document_ids=None),
            "positions": changed(positions=2 * rows["positions"]),
        }
    for name, nll in without.items():
        assert (nll - full).abs().max() > 0.01, name
