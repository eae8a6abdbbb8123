# SPDX-License-Identifier: Apache-2.0
"""A GPT over context-parallel ranks against one process: losses and all gradients."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.backend import LOCAL
from megatron.core.comm import trace
from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.distributed import DataParallel
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.transformer import AttentionConfig, MLPConfig, NormConfig, Recompute
from tests.support.closeness import assert_all_close, assert_piece_close
from tests.support.inputs import generator, microbatch, one_thread
from tests.support.nan_memory import nan_memory
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a grid of ranks.

    Args:
        documents: whether rows hold several documents.
        padded: shard the sequences [0, 6, 16] separately, padded to 8 and 12.
    """

    tp: int = 1
    cp: int = 2
    engine: str = "auto"
    dropout: float = 0.0
    window: int | None = None
    sinks: bool = False
    documents: bool = False
    padded: bool = False
    sequence_parallel: bool = False
    recompute: bool = False

    @property
    def config(self) -> GPTConfig:
        attention = dataclasses.replace(
            CONFIG.attention, dropout=self.dropout, window=self.window, sinks=self.sinks
        )
        return dataclasses.replace(CONFIG, attention=attention, hidden_dropout=self.dropout)

    @property
    def sharding(self) -> SequenceSharding:
        bounds = {"cu_seqlens": (0, 6, 16), "padded_cu_seqlens": (0, 8, 20)}
        return SequenceSharding.of(LENGTH, self.cp, **(bounds if self.padded else {}))


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
    bounds = ((0, 6, 16),) * ROWS if case.padded else DOCUMENT_BOUNDS if case.documents else None
    if bounds is not None:
        indices = torch.arange(LENGTH)
        starts = [torch.tensor(row[:-1]) for row in bounds]
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


def train_step(case: Case, groups: ProcessGroupCollection):
    """Return the losses, gradient shards, numbers of plans and cp collectives of a step.

    The step has two microbatches.
    """
    backend = dataclasses.replace(LOCAL, context_engine=case.engine)
    model = GPTModel(
        case.config, groups, sequence_parallel=case.sequence_parallel, seed=5, backend=backend
    )
    if case.recompute:
        model.set_recompute(Recompute(granularity="full", method="uniform", num_layers=1))
    perturb_weights(model)
    engine = DataParallel(model.store, groups)
    group, losses, plans = groups["cp"], [], []
    engine.begin_step()
    with nan_memory(), trace(groups) as records:
        for index in range(2):
            batch = batch_of(case, index)
            layout_fields = {name: batch.pop(name) for name in LAYOUT_FIELDS if name in batch}
            layout = SequenceLayout.of_rows(LENGTH, **layout_fields)
            if group.size > 1:
                layout = SequenceLayout.make(case.sharding, group.rank, rows=ROWS, **layout_fields)
            loss, nll = model.loss(*(layout.local(x) for x in batch.values()), layout=layout)
            engine.backward(loss, last=index == 1)
            losses.append((loss.detach(), nll.detach()))
            plans += [layout.num_plans] if group.size > 1 else []
        engine.finish()
    gradients = {}
    for handle in model.store.handles.values():
        flat = handle.main_grad.view(-1)
        for box in model.store.boxes(handle):
            values = flat[box.start : box.start + box.numel].view(box.sizes).clone()
            gradients[box.name, box.offsets] = values
    kinds = {record.kind for record in records if record.group == "cp"}
    return losses, gradients, plans, kinds


def on_rank(rank: int, world: int, cases: list[Case]) -> list:
    """Train every case on the ranks of its grid."""
    outputs = []
    for case in cases:
        grid = RankGrid(world_size=world, tp=case.tp, cp=case.cp)
        groups = ProcessGroupCollection.create(grid, rank=rank)
        outputs.append((groups["cp"].rank, train_step(case, groups)))
    return outputs


TWO_RANKS = {
    "p2p, dropout, packed": Case(engine="p2p", dropout=0.2, documents=True),
    "all_gather, dropout, packed, recomputed": Case(
        engine="all_gather", dropout=0.2, documents=True, recompute=True
    ),
    "a2a, dropout, packed": Case(engine="a2a", dropout=0.2, documents=True),
    "p2p, window and sinks": Case(engine="p2p", window=5, sinks=True),
    "a2a, window and sinks, packed": Case(engine="a2a", window=5, sinks=True, documents=True),
    "all_gather, sinks, padded": Case(engine="all_gather", sinks=True, padded=True, dropout=0.1),
    "p2p, padded": Case(engine="p2p", padded=True, dropout=0.1),
}
FOUR_RANKS = {
    "p2p": Case(tp=2, engine="p2p", documents=True, dropout=0.2, sequence_parallel=True),
    "all_gather": Case(
        tp=2, engine="all_gather", sinks=True, window=6, sequence_parallel=True, recompute=True
    ),
    "a2a": Case(tp=2, engine="a2a", documents=True, dropout=0.2, sinks=True),
    "cp 4": Case(cp=4, engine="auto", documents=True, sinks=True),
}
KINDS = {"p2p": {"send"}, "all_gather": {"all_gather"}, "a2a": {"all_to_all"}}


@pytest.mark.parametrize(("world", "cases"), [(2, TWO_RANKS), (4, FOUR_RANKS)])
def test_gradients_match_one_process(world: int, cases: dict[str, Case]):
    outputs = run_ranks(on_rank, world, list(cases.values()))
    for index, (name, case) in enumerate(cases.items()):
        with one_thread():
            whole = dataclasses.replace(case, recompute=False)
            expected, gradients, _, _ = train_step(whole, ProcessGroupCollection.single())
        for output in (rank_outputs[index] for rank_outputs in outputs):
            _check(name, case, output, expected, gradients)
        sums = [
            sum(float(loss) for loss, _ in rank_outputs[index][1][0]) for rank_outputs in outputs
        ]
        total = sum(float(loss) for loss, _ in expected)
        assert sum(sums) / case.tp == pytest.approx(total, rel=1e-6), name


def _check(name, case, output, expected, gradients) -> None:
    cp_rank, (losses, shards, plans, kinds) = output
    positions = torch.tensor(case.sharding.row_indices(cp_rank))
    real = positions >= 0
    got, reference = {}, {}
    for index, ((_, nll), (_, whole)) in enumerate(zip(losses, expected, strict=True)):
        got[f"nll {index}"] = nll[:, real]
        reference[f"nll {index}"] = whole[:, positions[real]]
    assert_all_close(got, reference)
    if case.engine in KINDS:
        assert kinds & {"send", "all_gather", "all_to_all"} == KINDS[case.engine], name
    # One plan per rank in the ring, or a single one, for any number of layers.
    assert len(set(plans)) == 1, (name, plans)
    assert plans[0] <= case.cp, (name, plans)
    for (weight, offsets), values in shards.items():
        whole = gradients[weight, (0,) * len(offsets)]
        assert_piece_close(f"{name}: {weight}", values, whole, offsets)


def check_refusals(rank: int, world: int) -> None:
    """Check the errors for models and layouts that do not fit two ranks."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    invalid = dataclasses.replace(CONFIG.attention, num_attention_heads=3, num_query_groups=3)
    backend = dataclasses.replace(LOCAL, context_engine="a2a")
    with pytest.raises(ValueError, match="3 query heads do not divide over 2"):
        GPTModel(dataclasses.replace(CONFIG, attention=invalid), groups, backend=backend)
    model = GPTModel(CONFIG, groups)
    batch = batch_of(Case(), 0)
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
    batch = batch_of(Case(documents=True), 0)
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
