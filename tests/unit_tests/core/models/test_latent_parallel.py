# SPDX-License-Identifier: Apache-2.0
"""A GPT with latent attention over tp, sequence and context parallel ranks against one process."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch

from megatron.core.backend import LOCAL
from megatron.core.comm import trace
from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.distributed import DataParallel
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
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
BORDERS = ((0, 5, 6, 11, 16), (0, 16), (0, 9, 16))
FULL = Recompute(granularity="full", method="uniform", num_layers=1)
SELECTIVE = Recompute(granularity="selective")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One model on one grid.

    Args:
        low: whether queries pass through a vector of low rank.
        split: compute weight gradients after all others, as schedules of split backwards do.
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


#: What of a microbatch is in its layout.
OF_LAYOUT = ("positions", "document_ids", "sample_ids")


def batch_of(case: Case, index: int) -> dict[str, torch.Tensor]:
    """Return a microbatch of whole rows, its documents included."""
    data = microbatch(
        seed=6, dp_rank=0, index=index, batch=ROWS, sequence=LENGTH, vocabulary=CONFIG.vocab_size
    )
    found = {
        "tokens": data.tokens,
        "labels": data.labels,
        "token_weights": data.loss_mask * 0.25,
        "sample_ids": data.sample_ids,
    }
    if case.documents:
        places = torch.arange(LENGTH)
        starts = [torch.tensor(row[:-1]) for row in BORDERS]
        ids = torch.stack([(places[:, None] >= s).sum(1) - 1 for s in starts])
        found["document_ids"] = ids
        found["positions"] = torch.stack([places - s[i] for s, i in zip(starts, ids, strict=True)])
    return found


def built(case: Case, groups: ProcessGroupCollection) -> GPTModel:
    """Return the model, every weight moved by what is the same on every grid."""
    backend = dataclasses.replace(LOCAL, context_engine=case.engine)
    model = GPTModel(
        case.config, groups, sequence_parallel=case.sequence_parallel, seed=5, backend=backend
    )
    model.set_recompute(case.recompute or Recompute())
    model.store.splits = case.split
    for handle in model.store.handles.values():
        for held in model.store.chunks(handle):
            noise = torch.randn(held.shape, generator=generator(9, *held.name.encode()))
            where = held.box.slices
            held.tensor.add_(0.2 * noise[where])
    return model


def trained(case: Case, groups: ProcessGroupCollection):
    """Return each nll, the gradient pieces, the trace and how often each weight's gradient was put
    off, of two microbatches of a step."""
    model = built(case, groups)
    engine = DataParallel(model.store, groups)
    nlls, waited = [], 0
    engine.begin_step()
    with nan_memory(), trace(groups) as records:
        for index in range(2):
            batch = batch_of(case, index)
            known = {name: batch.pop(name) for name in OF_LAYOUT if name in batch}
            layout = SequenceLayout.of_rows(LENGTH, **known)
            if case.cp > 1 and groups["cp"].size > 1:
                cut = SequenceSharding.of(LENGTH, case.cp)
                layout = SequenceLayout.make(cut, groups["cp"].rank, rows=ROWS, **known)
            loss, nll = model.loss(*(layout.local(x) for x in batch.values()), layout=layout)
            with model.store.defer() if case.split else contextlib.nullcontext() as queue:
                engine.backward(loss, last=index == 1)
            if queue is not None:
                waited += len(queue)
                queue.drain()
            nlls.append(nll.detach())
        engine.finish()
    found = {}
    for handle in model.store.handles.values():
        flat = handle.main_grad.view(-1)
        for box in model.store.boxes(handle):
            values = flat[box.start : box.start + box.numel].view(box.sizes).clone()
            found[box.name, box.offsets] = values
    return nlls, found, list(records), waited / len(model.store.handles)


def on_rank(rank: int, world: int, cases: list[Case]) -> list:
    """Train every case on the ranks of its grid."""
    found = []
    for case in cases:
        grid = RankGrid(world_size=world, tp=case.tp, cp=case.cp)
        groups = ProcessGroupCollection.create(grid, rank=rank)
        found.append((groups["cp"].rank, trained(case, groups)))
    return found


TWO = {
    "tp": Case(tp=2, documents=True),
    "tp, direct": Case(tp=2, low=False, split=True),
    "sequence": Case(tp=2, sequence_parallel=True, documents=True, recompute=FULL),
    "sequence, direct": Case(tp=2, sequence_parallel=True, low=False, recompute=SELECTIVE),
    "sequence, split": Case(tp=2, sequence_parallel=True, split=True, recompute=SELECTIVE),
    "p2p": Case(cp=2, engine="p2p", documents=True),
    "all_gather": Case(cp=2, engine="all_gather", recompute=FULL),
    "a2a": Case(cp=2, engine="a2a", documents=True, low=False),
}
FOUR = {"sequence, a2a": Case(tp=2, cp=2, engine="a2a", sequence_parallel=True, documents=True)}
KINDS = {"p2p": "send", "all_gather": "all_gather", "a2a": "all_to_all"}


@pytest.mark.parametrize(("world", "cases"), [(2, TWO), (4, FOUR)], ids=["two", "four"])
def test_every_gradient_is_that_of_one_process(world: int, cases: dict[str, Case]):
    results = run_ranks(on_rank, world, list(cases.values()))
    for number, (name, case) in enumerate(cases.items()):
        with one_thread():
            plain = dataclasses.replace(case, recompute=None, split=False)
            wanted, gradients, _, _ = trained(plain, ProcessGroupCollection.single())
        for result in results:
            _check(name, case, result[number], wanted, gradients)


def _check(name: str, case: Case, found, wanted, gradients) -> None:
    cp_rank, (nlls, pieces, records, waited) = found
    places = torch.tensor(SequenceSharding.of(LENGTH, case.cp).row_indices(cp_rank))
    got = {f"nll {index}": nll for index, nll in enumerate(nlls)}
    assert_all_close(got, {f"nll {index}": nll[:, places] for index, nll in enumerate(wanted)})
    assert {weight for weight, _ in pieces} == {weight for weight, _ in gradients}
    for (weight, offsets), values in pieces.items():
        whole = gradients[weight, (0,) * len(offsets)]
        assert_piece_close(f"{name}: {weight}", values, whole, offsets)
    if case.cp > 1:
        assert_active(records, kind=KINDS[case.engine], group="cp")
    if case.tp > 1:
        assert_active(
            records, kind="reduce_scatter" if case.sequence_parallel else "all_reduce", group="tp"
        )
    assert waited == (2 if case.split else 0), (name, waited)


def test_dropout_documents_and_scale_are_active():
    """Each changes the losses: what is compared above is not a model without them."""
    single = ProcessGroupCollection.single()
    with one_thread(), torch.no_grad():
        model, batch = built(Case(), single), batch_of(Case(documents=True), 0)
        plain = dataclasses.replace(
            CONFIG, attention=dataclasses.replace(CONFIG.attention, scale_factor=1.0)
        )
        other = GPTModel(plain, single)
        for name, handle in other.store.handles.items():
            handle.get().copy_(model.store.handles[name].get())
        rows = {name: batch.pop(name) for name in OF_LAYOUT}
        layout = SequenceLayout.of_rows(LENGTH, **rows)
        whole = model.loss(**batch, layout=layout)[1]

        def changed(**values: object) -> torch.Tensor:
            return model.loss(**batch, layout=SequenceLayout.of_rows(LENGTH, **rows | values))[1]

        without = {
            "scale": other.loss(**batch, layout=layout)[1],
            "dropout": changed(sample_ids=None),
            "documents": changed(document_ids=None),
            "positions": changed(positions=2 * rows["positions"]),
        }
    for name, nll in without.items():
        assert (nll - whole).abs().max() > 0.01, name
