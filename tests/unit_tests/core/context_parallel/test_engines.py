# SPDX-License-Identifier: Apache-2.0
"""Context-parallel engines against attention of whole rows in one process, and their traffic."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from megatron.core import Group, ProcessGroupCollection, RankGrid
from megatron.core.comm import trace
from megatron.core.context_parallel import SequenceLayout, SequenceSharding, context_attention
from megatron.core.context_parallel.attention import (
    Attend,
    AttentionShape,
    choose,
    explain,
    moved_bytes,
)
from megatron.core.ops.attention import attention
from megatron.core.ops.dropout import AttentionDropout, dropout_key
from tests.support.closeness import assert_all_close
from tests.support.ranks import run_ranks
from tests.support.simulated_links import Late, simulated

ROWS, FEATURES = 3, 6


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention call.

    Args:
        documents: cu_seqlens of each row's documents; None is one document per row.
        shard_documents: shard each document of the (equal) rows separately.
        padded: `documents` of a row with padding.
    """

    cp: int
    engine: str
    length: int = 24
    heads: int = 4
    groups: int = 2
    order: str = "zigzag"
    documents: tuple[tuple[int, ...], ...] | None = None
    shard_documents: bool = False
    padded: tuple[int, ...] | None = None
    window: int | None = None
    sinks: bool = False
    dropout: float = 0.0
    late: bool = False
    dtype: torch.dtype = torch.float64


UNEVEN = ((0, 5, 6, 17, 24), (0, 24), (0, 11, 24))
EQUAL = ((0, 8, 24),) * ROWS
ENGINES = ("p2p", "all_gather", "a2a")
CASES = {
    "dense": {},
    "one group": {"groups": 1},
    "as many groups as heads": {"groups": 4},
    "contiguous": {"order": "contiguous"},
    "window": {"window": 7},
    "window of one": {"window": 1},
    "documents": {"documents": UNEVEN},
    "documents, window, sinks": {"documents": UNEVEN, "window": 4, "sinks": True},
    "sharded documents": {"documents": EQUAL, "shard_documents": True},
    "padded documents": {
        "documents": ((0, 5, 24),) * ROWS,
        "shard_documents": True,
        "padded": (0, 8, 32),
    },
    "sinks": {"sinks": True, "late": True},
    "dropout": {"dropout": 0.3, "documents": UNEVEN},
    "dropout, contiguous, window": {"dropout": 0.3, "order": "contiguous", "window": 9},
}


def full_inputs(case: Case) -> dict[str, torch.Tensor]:
    """Return random inputs of whole rows and the gradient of the output."""
    generator = torch.Generator().manual_seed(11)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(case.dtype)

    kv = (case.length, ROWS, case.groups, FEATURES)
    inputs = {
        "query": random(case.length, ROWS, case.heads, FEATURES),
        "key": random(*kv),
        "value": random(*kv),
        "grad": random(case.length, ROWS, case.heads, FEATURES),
    }
    if case.sinks:
        inputs["sinks"] = random(case.heads)
    return inputs


def make_dropout(case: Case) -> AttentionDropout | None:
    """Return the dropout of a case, if any."""
    if not case.dropout:
        return None
    key = dropout_key(3, "layer", "attention")
    return AttentionDropout(
        rate=case.dropout, key=key, sample_ids=torch.arange(ROWS) + 70, head_offset=0
    )


def make_sharding(case: Case) -> SequenceSharding:
    """Return the sharding of a case's rows."""
    bounds = case.documents[0] if case.shard_documents and case.documents else None
    return SequenceSharding.of(
        case.length,
        case.cp,
        order=case.order,
        cu_seqlens=bounds,
        padded_cu_seqlens=case.padded,
    )


def document_ids(case: Case) -> torch.Tensor | None:
    """Return [b, s], the number of each token's document in its row."""
    if case.documents is None:
        return None
    positions = torch.arange(case.length)
    document_starts = [torch.tensor(bounds[1:-1]) for bounds in case.documents]
    return torch.stack([(positions[:, None] >= starts).sum(1) for starts in document_starts])


def attend_on_rank(rank: int, world: int, case: Case):
    """Attend forward and backward on one rank.

    Returns:
        (local results, gradient of the sinks, bytes of each collective by kind, number of plans).
    """
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    sharding = make_sharding(case)
    layout = SequenceLayout.make(sharding, rank, rows=ROWS, document_ids=document_ids(case))
    row_indices = torch.tensor(sharding.row_indices(rank))
    inputs = full_inputs(case)
    leaves = {
        n: _local_rows(inputs[n], row_indices).requires_grad_() for n in ("query", "key", "value")
    }
    sinks = inputs["sinks"].requires_grad_() if case.sinks else None
    attend = Attend(
        layout=layout,
        group=groups["cp"],
        scale=FEATURES**-0.5,
        window=case.window,
        dropout=make_dropout(case),
    )
    with trace(groups) as records, simulated(groups, Late()) if case.late else trace(groups):
        for _ in range(2):  # two layers
            out = context_attention(
                *leaves.values(), attend=attend, engine=case.engine, sinks=sinks
            )
        torch.autograd.backward((out,), (_local_rows(inputs["grad"], row_indices),))
    results = {"out": out.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}
    sink_grad = None if sinks is None else sinks.grad
    sent_bytes: dict[str, list[int]] = {}
    for record in records:
        sent_bytes.setdefault(record.kind, []).append(record.bytes)
    return results, sink_grad, sent_bytes, layout.num_plans


def _local_rows(rows: torch.Tensor, row_indices: torch.Tensor) -> torch.Tensor:
    """Return the tokens [s/cp, ...] of rows [s, ...]; padding gets a large number."""
    return torch.where((row_indices >= 0)[:, None, None, None], rows[row_indices], 1e3)


def reference_results(case: Case) -> dict[str, torch.Tensor]:
    """Return the results of attention over whole rows in one process."""
    inputs = full_inputs(case)
    leaves = {n: inputs[n].requires_grad_() for n in ("query", "key", "value")}
    sinks = inputs["sinks"].requires_grad_() if case.sinks else None
    ids = document_ids(case)
    out, _ = attention(
        *leaves.values(),
        window=case.window,
        sinks=sinks,
        document_ids=None if ids is None else ids.t().contiguous(),
        dropout=make_dropout(case),
    )
    torch.autograd.backward((out,), (inputs["grad"],))
    results = {"out": out.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}
    return results if sinks is None else {**results, "sinks": sinks.grad}


def assert_matches_reference(case: Case, ranks) -> None:
    """Combine the ranks' results and compare them with attention over whole rows."""
    sharding, expected = make_sharding(case), reference_results(case)
    combined = {}
    for name in ("out", "query", "key", "value"):
        values = torch.full_like(expected[name], torch.nan)
        for rank, (results, *_) in enumerate(ranks):
            row_indices = torch.tensor(sharding.row_indices(rank))
            values[row_indices[row_indices >= 0]] = results[name][row_indices >= 0]
        combined[name] = values
    if case.sinks:
        combined["sinks"] = torch.stack([sinks for _, sinks, *_ in ranks]).sum(0)
    # The softmax over one key is 1, so query and key have no gradient.
    zeros = ("query", "key") if case.window == 1 else ()
    assert_all_close(combined, expected, bound=1e-12, zeros=zeros)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_match_single_process_attention(name, engine):
    case = Case(cp=2, engine=engine, **CASES[name])
    assert_matches_reference(case, run_ranks(attend_on_rank, 2, case))


@pytest.mark.parametrize("name", ["documents, window, sinks", "padded documents", "dropout"])
def test_one_rank_attends_document_by_document(name):
    case = Case(cp=1, engine="auto", **CASES[name])
    assert_matches_reference(case, run_ranks(attend_on_rank, 1, case))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["documents, window, sinks", "dropout", "one group"])
def test_four_ranks_match_single_process_attention(name, engine):
    case = Case(cp=4, engine=engine, **CASES[name])
    assert_matches_reference(case, run_ranks(attend_on_rank, 4, case))


@pytest.mark.parametrize("engine", ENGINES)
def test_sent_bytes_match_formula_and_plans_are_built_once(engine):
    case = Case(cp=4, engine=engine, groups=2, documents=UNEVEN)
    shape = AttentionShape(
        tokens=6, rows=ROWS, heads=4, groups=2, features=FEATURES, element_bytes=8
    )
    for _, _, sent_bytes, plans in run_ranks(attend_on_rank, 4, case):
        layers = 2  # forward of both layers, backward of the layer whose output is used
        pair = 2 * shape.groups * shape.head_bytes
        if engine == "p2p":
            sent = sent_bytes["send"]
            assert len(sent) == layers * 3 + 3 + 4
            assert sent_bytes["receive"] == sent
            layer_bytes = sum(sent) - 3 * pair
            # Gradient sums are fp64, as are all tensors of this test.
            assert layer_bytes == 6 * pair + 4 * pair
            assert moved_bytes(engine, shape, 4) == 6 * pair + 4 * pair // 2
        elif engine == "all_gather":
            assert sent_bytes["all_gather"] == [4 * pair] * (layers + 1)
            assert sent_bytes["reduce_scatter"] == [4 * pair]
            assert moved_bytes(engine, shape, 4) == 3 * 3 * pair
        else:
            qkv, out = (4 + 2 * 4) * shape.head_bytes, 4 * shape.head_bytes
            assert sent_bytes["all_to_all"] == [qkv, out] * layers + [out, qkv]
            assert moved_bytes(engine, shape, 4) == 3 * 2 * (qkv + out) // 4
        assert plans == {"p2p": 4, "all_gather": 1, "a2a": 1}[engine]


def test_ring_sums_bf16_gradients_in_fp32():
    case = Case(cp=4, engine="p2p", dtype=torch.bfloat16)
    shape = AttentionShape(
        tokens=6, rows=ROWS, heads=4, groups=2, features=FEATURES, element_bytes=2
    )
    pair = 2 * shape.groups * shape.head_bytes
    ranks = run_ranks(attend_on_rank, 4, case)
    for _, _, sent_bytes, _ in ranks:  # the other layer's forward adds 3 steps
        assert sum(sent_bytes["send"]) == moved_bytes("p2p", shape, 4) + 3 * pair
        assert sorted(set(sent_bytes["send"])) == [pair, 2 * pair]


AUTO_CHOICES = {
    # (heads, groups, cp): traffic of a rank in units of one head's local tokens, for p2p (the
    # fp32 gradient sums of bf16 tensors count twice), all_gather, a2a
    (32, 32, 2): ("a2a", (384, 192, 128)),
    (32, 8, 2): ("all_gather", (96, 48, 80)),
    (32, 8, 8): ("a2a", (480, 336, 140)),
    (64, 8, 4): ("all_gather", (224, 144, 216)),
    (32, 1, 4): ("all_gather", (28, 18, 108)),
    (40, 10, 16): ("all_gather", (1240, 900, None)),
}


@pytest.mark.parametrize("shape", AUTO_CHOICES)
def test_auto_chooses_the_engine_with_least_traffic(shape):
    heads, groups, cp = shape
    engine, units = AUTO_CHOICES[shape]
    local = AttentionShape(
        tokens=512, rows=1, heads=heads, groups=groups, features=128, element_bytes=2
    )
    choice = choose("auto", local, cp)
    assert choice.engine == engine
    for name, count in zip(ENGINES, units, strict=True):
        if count is None:
            assert "not a2a" in choice.why
            assert "use p2p" in choice.why
        else:
            assert moved_bytes(name, local, cp) == count * local.head_bytes
    assert engine in explain("auto", local, cp)


def test_unsupported_engines_and_layouts_are_refused():
    shape = AttentionShape(tokens=8, rows=1, heads=6, groups=2, features=4, element_bytes=4)
    with pytest.raises(ValueError, match=r"6 query heads do not divide over 4 .* use p2p"):
        choose("a2a", shape, 4)
    with pytest.raises(ValueError, match="p2p, all_gather, a2a"):
        choose("ulysses", shape, 2)
    x = torch.zeros(4, 1, 2, 4)
    layout = SequenceLayout.make(SequenceSharding.of(8, 2), 0, rows=1)
    attend = Attend(layout=layout, group=Group.single("cp"), scale=1.0)
    with pytest.raises(ValueError, match=r"is for rank 0 of 2, but group cp is rank 0 of 1"):
        context_attention(x, x, x, attend=attend)
