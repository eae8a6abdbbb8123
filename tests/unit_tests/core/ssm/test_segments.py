# SPDX-License-Identifier: Apache-2.0
"""Recurrences in segments of several ranks against documents token by token."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from random import Random

import pytest
import torch
from torch.nn import functional

from megatron.core.comm import trace
from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.ops.causal_conv1d import causal_conv1d
from megatron.core.ops.gated_delta_rule import delta_recurrence
from megatron.core.ops.recurrence import Recurrence, RecurrenceInputs
from megatron.core.ops.sequences import Sequences
from megatron.core.ops.state_space_dual import state_space_recurrence
from megatron.core.process_groups import Group, ProcessGroupCollection, RankGrid
from megatron.core.ssm.choice import LinearShape, sent_bytes
from megatron.core.ssm.state_passing import halo_rows, recur_in_segments
from tests.support.closeness import assert_all_close
from tests.support.ranks import run_ranks
from tests.unit_tests.core.context_parallel.random_cuts import random_case
from tests.unit_tests.core.context_parallel.test_host import reads
from tests.unit_tests.core.ssm.token_by_token import run_all

ROWS, GROUPS, SHARED, KEYS, VALUES, WIDTH, LENGTH = 2, 2, 2, 3, 5, 4, 24
CHANNELS = 2 * KEYS + SHARED * VALUES  # of a unit, that are convolved
FEATURES = CHANNELS + 2 * SHARED
KINDS = ("delta", "dual")


def recurrence_of(kind: str):
    """Return the recurrence under test, in small chunks."""
    made = {"delta": delta_recurrence, "dual": state_space_recurrence}[kind]
    return made(chunk_size=4)


@dataclass
class Watched:
    """A recurrence, and the tokens of each `prepare`."""

    inner: Recurrence
    seen: list[int] = field(default_factory=list)

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def prepare(self, inputs, sequences):
        self.seen.append(sequences.tokens)
        return self.inner.prepare(inputs, sequences)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows and how they are cut.

    Args:
        documents: of each row, where its documents begin and end; None is one a row.
        bounds: of the sequences that are cut apart.
        padded: these with padding.
    """

    kind: str
    order: str = "zigzag"
    documents: tuple[tuple[int, ...], ...] | None = None
    bounds: tuple[int, ...] | None = None
    padded: tuple[int, ...] | None = None
    length: int = LENGTH


# Borders off and on those of runs, which are multiples of 3, 6 or 12; documents within a run.
UNEVEN = ((0, 5, 6, 17, 24), (0, 12, 18, 19, 24))
CASES = {
    "dense": {},
    "dense, contiguous": {"order": "contiguous"},
    "documents": {"documents": UNEVEN},
    "documents, contiguous": {"documents": UNEVEN, "order": "contiguous"},
    "cut apart": {"bounds": (0, 8, 24)},
    "padded": {"bounds": (0, 5, 24), "padded": (0, 8, 32)},
    "tiny and padded": {"bounds": (0, 1, 8, 24), "padded": (0, 8, 16, 32)},
    "nothing crosses": {"documents": ((0, 3, 6, 9, 12, 15, 18, 21, 24),) * ROWS},
}


def cut_of(case: Case, cp: int) -> SequenceSharding:
    """Return how the rows of a case lie over the ranks."""
    return SequenceSharding.of(
        case.length, cp, order=case.order, cu_seqlens=case.bounds, padded_cu_seqlens=case.padded
    )


def document_ids(case: Case) -> torch.Tensor | None:
    """Return [b, s], the number of each token's document in its row."""
    if case.documents is None:
        return None
    places = torch.arange(case.length)
    borders = [torch.tensor(bounds[1:-1]) for bounds in case.documents]
    return torch.stack([(places[:, None] >= border).sum(1) for border in borders])


def random(seed: int, *shape: int) -> torch.Tensor:
    """Return fp64 numbers."""
    source = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=source, dtype=torch.float64)


def whole_inputs(length: int = LENGTH) -> dict[str, torch.Tensor]:
    """Return units of whole rows, the weight of the convolution and the gradient of the output."""
    return {
        "units": random(3, length, ROWS, GROUPS, FEATURES),
        "weight": random(4, GROUPS, CHANNELS, WIDTH),
        "grad": random(5, length, ROWS, GROUPS * SHARED, VALUES),
    }


def convolved(x, weight, sequences: Sequences) -> torch.Tensor:
    """Convolve packed tokens [t, u, c] of each sequence."""
    outs = []
    for number, start in enumerate(sequences.bounds[:-1]):
        part = x[start : sequences.bounds[number + 1]]
        windows = torch.cat([part.new_zeros(WIDTH - 1, *x.shape[1:]), part]).unfold(
            0, WIDTH, 1
        )  # [n, u, c, W]
        outs.append((windows * weight).sum(-1))
    return functional.silu(torch.cat(outs))


def inputs_of(mixed: torch.Tensor, rest: torch.Tensor) -> RecurrenceInputs:
    """Return what a recurrence reads."""
    query, key, value = mixed.split([KEYS, KEYS, SHARED * VALUES], dim=-1)
    decay, strength = rest.unflatten(-1, (2, SHARED)).unbind(2)
    return RecurrenceInputs(
        query,
        functional.normalize(key, dim=-1),
        value.unflatten(-1, (SHARED, VALUES)).flatten(1, 2),
        -functional.softplus(decay - 1).flatten(1),
        strength.sigmoid().flatten(1),
    )


def passed_on(groups: ProcessGroupCollection, case: Case):
    """Run one case as one rank; return local results, what was sent, and how pieces hang on."""
    group = groups["cp"]
    cut = cut_of(case, group.size)
    layout = SequenceLayout.make(cut, group.rank, rows=ROWS, document_ids=document_ids(case))
    places = torch.tensor(cut.row_indices(group.rank))
    rows = whole_inputs(case.length)
    units = local(rows["units"], places).requires_grad_()
    weight = rows["weight"].requires_grad_()
    with trace(groups) as records:
        pieces = layout.local_sequences(ROWS)
        packed = pieces.pack(units)
        before = packed[..., :CHANNELS]
        halo = halo_rows(before, pieces, group, width=WIDTH - 1)
        mixed, _ = causal_conv1d(
            before, weight, None, sequences=pieces.sequences, activation="silu", initial=halo
        )
        inputs = inputs_of(mixed, packed[..., CHANNELS:])
        recurrence = Watched(recurrence_of(case.kind))
        out = recur_in_segments(recurrence, inputs, pieces, group)
        out = pieces.unpack(out)
        forward = len(records)
        torch.autograd.backward((out,), (local(rows["grad"], places),))
    found = {"out": out.detach(), "units": units.grad}
    sent = [(record.kind, record.bytes) for record in records]
    halo = pieces.halo(WIDTH - 1)
    lent = tuple(
        sum(counts) - counts[group.rank] for counts in (halo.send_counts, halo.receive_counts)
    )
    return found, weight.grad, (sent[:forward], sent[forward:]), lent, recurrence.seen


def local(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return tokens [s/cp, ...] of rows [s, ...]; large numbers where there is padding."""
    return torch.where((places >= 0)[:, None, None, None], rows[places], 1e3)


def all_cases(rank: int, world: int, cases: tuple[Case, ...]):
    """Run cases as one rank."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    return [passed_on(groups, case) for case in cases]


@functools.cache
def expected_of(case: Case) -> dict[str, torch.Tensor]:
    """Return the results of whole documents."""
    rows = whole_inputs(case.length)
    units, weight = rows["units"].requires_grad_(), rows["weight"].requires_grad_()
    outs = []
    for row in range(ROWS):
        bounds = case.documents[row] if case.documents else case.bounds or (0, case.length)
        sequences = Sequences(bounds)
        packed = units[:, row]
        mixed = convolved(packed[..., :CHANNELS], weight, sequences)
        inputs = inputs_of(mixed, packed[..., CHANNELS:])
        outs.append(run_all(case.kind, inputs, sequences)[0])
    out = torch.stack(outs, dim=1)
    torch.autograd.backward((out,), (rows["grad"],))
    return {"out": out.detach(), "units": units.grad, "weight": weight.grad}


def together(case: Case, ranks) -> dict[str, torch.Tensor]:
    """Put the ranks' results together."""
    cut = cut_of(case, len(ranks))
    found = {}
    for name in ("out", "units"):
        values = torch.full(
            (case.length, *ranks[0][0][name].shape[1:]), torch.nan, dtype=torch.float64
        )
        for rank, (local_results, *_) in enumerate(ranks):
            places = torch.tensor(cut.row_indices(rank))
            values[places[places >= 0]] = local_results[name][places >= 0]
        found[name] = values
    found["weight"] = torch.stack([weight for _, weight, *_ in ranks]).sum(0)
    return found


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_ranks_pass_states_as_one_process_does(cp):
    cases = {(name, kind): Case(kind=kind, **CASES[name]) for name in CASES for kind in KINDS}
    ranks = run_ranks(all_cases, cp, tuple(cases.values()))
    crossed = alone = apart = joint = 0
    for (name, kind), case, results in zip(
        cases, cases.values(), zip(*ranks, strict=True), strict=True
    ):
        try:
            assert_all_close(together(case, results), expected_of(case), bound=1e-11)
        except AssertionError as error:
            raise AssertionError(f"{name}, {kind}, cp {cp}:\n{error}") from error
        crosses = cp > 1 and name != "nothing crosses"
        crossed += crosses
        for _, _, (forward, backward), _, seen in results:
            alone += seen[1:] == [1]  # a token that tells the shape of summaries
            apart += len(seen) > 1 and 4 * seen[-1] <= seen[0]
            joint += crosses and len(seen) == 1
            kinds = ["all_to_all", "all_gather"] if crosses else []
            assert [kind for kind, _ in forward] == kinds, name
            assert [kind for kind, _ in backward] == kinds[::-1], name
    assert crossed == (0 if cp == 1 else 2 * (len(CASES) - 1))
    assert (alone > 1, apart > 2, joint > 2) == (cp > 1,) * 3


def drawn(seed: int) -> Case:
    """Return a random case for 3 ranks."""
    rng = Random(seed)
    row = random_case(rng)
    while row.size != 3 or row.total > 60:
        row = random_case(rng)
    cut = row.cut()
    borders = [rng.sample(range(row.total + 1), min(row.total, n)) for n in (0, 3)]
    return Case(
        kind=rng.choice(KINDS),
        order=row.order,
        documents=tuple(tuple(sorted({*cut.bounds, *more})) for more in borders),
        bounds=cut.bounds,
        padded=cut.padded,
        length=row.total,
    )


@pytest.mark.slow
def test_ranks_pass_states_of_any_cut():
    cases = [drawn(seed) for seed in range(80)]
    ranks = run_ranks(all_cases, 3, tuple(cases))
    crossed = 0
    for case, results in zip(cases, zip(*ranks, strict=True), strict=True):
        try:
            assert_all_close(together(case, results), expected_of(case), bound=1e-11)
        except AssertionError as error:
            raise AssertionError(f"{case}:\n{error}") from error
        crossed += bool(results[0][2][0])
    assert crossed > 40


@pytest.mark.parametrize("cp", [2, 4])
def test_what_leaves_a_rank_is_the_formula(cp):
    cases = [Case(kind=kind, order=order) for kind in KINDS for order in ("zigzag", "contiguous")]
    ranks = run_ranks(all_cases, cp, tuple(cases))
    for case, results in zip(cases, zip(*ranks, strict=True), strict=True):
        shape = LinearShape(
            units=GROUPS,
            features_in=GROUPS * FEATURES,
            features_out=GROUPS * SHARED * VALUES,
            heads=GROUPS * SHARED,
            key_channels=KEYS,
            value_channels=VALUES,
            transition=KEYS if case.kind == "delta" else 1,
            conv_channels=GROUPS * CHANNELS,
            conv_width=WIDTH,
        )
        cut = cut_of(case, cp)
        layout = SequenceLayout.make(cut, 0, rows=ROWS)
        # States are fp64 here, as everything is: twice the bytes that the formula counts.
        shape = shape.with_tokens(layout, ROWS, element_bytes=4)
        left = []
        for _, _, (forward, backward), lent, _ in results:
            row = GROUPS * CHANNELS * 8
            assert forward[0] == ("all_to_all", lent[0] * row)
            assert backward[1] == ("all_to_all", lent[1] * row)
            gathered = (forward[1][1] + backward[0][1]) * (cp - 1) // cp
            left.append(gathered + 2 * shape.summaries(cp) * (WIDTH - 1) * row)
            most = shape.summaries(cp) * (WIDTH - 1)
            assert lent[0] <= most
            assert lent[1] <= most
        assert set(left) == {2 * sent_bytes("segments", shape, cp)}, case


def two_layers(rank: int, world: int):
    """Run two bf16 layers, twice; return what the host read, maps made, and what was gathered."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    case = Case(kind="delta", documents=UNEVEN)
    layout = SequenceLayout.make(
        cut_of(case, world), rank, rows=ROWS, document_ids=document_ids(case)
    )
    places = torch.tensor(layout.sharding.row_indices(rank))
    x = local(whole_inputs()["units"], places).bfloat16().requires_grad_()
    for _ in range(2):  # maps are made in the first
        with reads() as seen, trace(groups) as records:
            pieces = layout.local_sequences(ROWS)
            packed, out = pieces.pack(x), 0.0
            for _ in range(2):
                halo = halo_rows(packed, pieces, groups["cp"], width=3)
                inputs = inputs_of(packed[..., :CHANNELS], packed[..., CHANNELS:])
                recurrence = recurrence_of("delta")
                out = out + recur_in_segments(recurrence, inputs, pieces, groups["cp"])
                out = out + halo.sum()
            torch.autograd.backward((out.sum(),))
    return seen, layout.num_maps, {(record.kind, record.dtype) for record in records}


def test_the_host_never_waits_and_states_travel_in_fp32():
    for seen, maps, sent in run_ranks(two_layers, 2):
        assert seen == []
        assert maps == 1
        assert sent == {("all_gather", "float32"), ("all_to_all", "bfloat16")}


def test_what_cannot_be_is_refused():
    layout = SequenceLayout.make(SequenceSharding.of(8, 2), 1, rows=1)
    pieces = layout.local_sequences(1)
    x = torch.zeros(4, GROUPS, KEYS)
    with pytest.raises(ValueError, match="rank 1 of 2, group cp is rank 0 of 1"):
        halo_rows(x, pieces, Group.single("cp"), width=3)
