# SPDX-License-Identifier: Apache-2.0
"""Recurrences over segments on several ranks, against whole documents token by token."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from random import Random

import pytest
import torch
from torch.nn import functional

from megatron.core import Group, ProcessGroupCollection, RankGrid
from megatron.core.comm import trace
from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.ops.recurrence import (
    Recurrence,
    RecurrenceInputs,
    causal_conv1d,
    delta_recurrence,
    naive,
    state_space_recurrence,
)
from megatron.core.ops.sequences import Sequences
from megatron.core.ssm.mixer_config import LinearShape, sent_bytes
from megatron.core.ssm.state_passing import halo_rows, recur_in_segments
from tests.support.closeness import assert_all_close
from tests.support.ranks import run_ranks
from tests.unit_tests.core.context_parallel.random_cuts import random_case
from tests.unit_tests.core.context_parallel.test_host import host_reads

ROWS, GROUPS, SHARED, KEYS, VALUES, WIDTH, LENGTH = 2, 2, 2, 3, 5, 4, 24
CHANNELS = 2 * KEYS + SHARED * VALUES  # convolved channels of a unit
FEATURES = CHANNELS + 2 * SHARED
KINDS = ("delta", "dual")
EQUATIONS = {"delta": naive.delta_rule, "dual": naive.ssd}


def recurrence_of(kind: str):
    """Return the recurrence under test, in small chunks."""
    factory = {"delta": delta_recurrence, "dual": state_space_recurrence}[kind]
    return factory(chunk_size=4)


@dataclass
class RecordingRecurrence:
    """A recurrence that records the number of tokens of each `prepare`."""

    inner: Recurrence
    seen: list[int] = field(default_factory=list)

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def prepare(self, inputs, sequences):
        self.seen.append(sequences.tokens)
        return self.inner.prepare(inputs, sequences)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows and their sharding over ranks.

    Args:
        documents: bounds of the documents of each row; None means one document per row.
        bounds: bounds of sequences that are sharded separately.
        padded: the same bounds with padding.
    """

    kind: str
    order: str = "zigzag"
    documents: tuple[tuple[int, ...], ...] | None = None
    bounds: tuple[int, ...] | None = None
    padded: tuple[int, ...] | None = None
    length: int = LENGTH


# Document bounds on and off the token ranges, multiples of 3, 6 or 12; documents within a range.
UNEVEN = ((0, 5, 6, 17, 24), (0, 12, 18, 19, 24))
CASES = {
    "dense": {},
    "dense, contiguous": {"order": "contiguous"},
    "documents": {"documents": UNEVEN},
    "documents, contiguous": {"documents": UNEVEN, "order": "contiguous"},
    "sequences": {"bounds": (0, 8, 24)},
    "padded": {"bounds": (0, 5, 24), "padded": (0, 8, 32)},
    "tiny and padded": {"bounds": (0, 1, 8, 24), "padded": (0, 8, 16, 32)},
    "no document crosses ranks": {"documents": ((0, 3, 6, 9, 12, 15, 18, 21, 24),) * ROWS},
}


def sharding_of(case: Case, cp: int) -> SequenceSharding:
    """Return the sharding of a case's rows over the ranks."""
    return SequenceSharding.of(
        case.length, cp, order=case.order, cu_seqlens=case.bounds, padded_cu_seqlens=case.padded
    )


def document_ids(case: Case) -> torch.Tensor | None:
    """Return [b, s], the index of each token's document in its row."""
    if case.documents is None:
        return None
    positions = torch.arange(case.length)
    starts = [torch.tensor(bounds[1:-1]) for bounds in case.documents]
    return torch.stack([(positions[:, None] >= start).sum(1) for start in starts])


def random_fp64(seed: int, *shape: int) -> torch.Tensor:
    """Return normally distributed fp64 numbers."""
    source = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=source, dtype=torch.float64)


def global_inputs(length: int = LENGTH) -> dict[str, torch.Tensor]:
    """Return global units, the weight of the convolution and the gradient of the output."""
    return {
        "units": random_fp64(3, length, ROWS, GROUPS, FEATURES),
        "weight": random_fp64(4, GROUPS, CHANNELS, WIDTH),
        "grad": random_fp64(5, length, ROWS, GROUPS * SHARED, VALUES),
    }


def inputs_of(mixed: torch.Tensor, gates: torch.Tensor) -> RecurrenceInputs:
    """Return the inputs of the recurrence."""
    query, key, value = mixed.split([KEYS, KEYS, SHARED * VALUES], dim=-1)
    decay, beta = gates.unflatten(-1, (2, SHARED)).unbind(2)
    return RecurrenceInputs(
        query,
        functional.normalize(key, dim=-1),
        value.unflatten(-1, (SHARED, VALUES)).flatten(1, 2),
        -functional.softplus(decay - 1).flatten(1),
        beta.sigmoid().flatten(1),
    )


def run_case(groups: ProcessGroupCollection, case: Case):
    """Run one case on one rank.

    Returns the local outputs and gradients, the collectives of forward and backward, the halo
    tokens sent and received, and the tokens of each `prepare`.
    """
    group = groups["cp"]
    sharding = sharding_of(case, group.size)
    layout = SequenceLayout.make(sharding, group.rank, rows=ROWS, document_ids=document_ids(case))
    indices = torch.tensor(sharding.row_indices(group.rank))
    rows = global_inputs(case.length)
    units = local(rows["units"], indices).requires_grad_()
    weight = rows["weight"].requires_grad_()
    with trace(groups) as records:
        local_sequences = layout.local_sequences(ROWS)
        packed = local_sequences.pack(units)
        conv_inputs = packed[..., :CHANNELS]
        halo = halo_rows(conv_inputs, local_sequences, group, width=WIDTH - 1)
        mixed, _ = causal_conv1d(
            conv_inputs,
            weight,
            None,
            sequences=local_sequences.sequences,
            activation="silu",
            initial=halo,
        )
        inputs = inputs_of(mixed, packed[..., CHANNELS:])
        recurrence = RecordingRecurrence(recurrence_of(case.kind).operations(inputs))
        out = recur_in_segments(recurrence, inputs, local_sequences, group)
        out = local_sequences.unpack(out)
        forward = len(records)
        torch.autograd.backward((out,), (local(rows["grad"], indices),))
    outputs = {"out": out.detach(), "units": units.grad}
    sent = [(record.kind, record.bytes) for record in records]
    halo = local_sequences.halo(WIDTH - 1)
    halo_tokens = tuple(
        sum(counts) - counts[group.rank] for counts in (halo.send_counts, halo.receive_counts)
    )
    return outputs, weight.grad, (sent[:forward], sent[forward:]), halo_tokens, recurrence.seen


def local(rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return tokens [s/cp, ...] of rows [s, ...] at `indices`, with large numbers as padding."""
    return torch.where((indices >= 0)[:, None, None, None], rows[indices], 1e3)


def run_cases(rank: int, world: int, cases: tuple[Case, ...]):
    """Run all cases on one rank."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    return [run_case(groups, case) for case in cases]


@functools.cache
def reference_outputs(case: Case) -> dict[str, torch.Tensor]:
    """Return outputs and gradients of whole documents."""
    rows = global_inputs(case.length)
    units, weight = rows["units"].requires_grad_(), rows["weight"].requires_grad_()
    outs = []
    for row in range(ROWS):
        bounds = case.documents[row] if case.documents else case.bounds or (0, case.length)
        sequences = Sequences(bounds)
        packed = units[:, row]
        mixed, _ = naive.causal_conv1d(
            packed[..., :CHANNELS], weight, None, sequences=sequences, activation="silu"
        )
        inputs = inputs_of(mixed, packed[..., CHANNELS:])
        outs.append(naive.recur(EQUATIONS[case.kind], inputs, sequences)[0])
    out = torch.stack(outs, dim=1)
    torch.autograd.backward((out,), (rows["grad"],))
    return {"out": out.detach(), "units": units.grad, "weight": weight.grad}


def gather_outputs(case: Case, ranks) -> dict[str, torch.Tensor]:
    """Return global outputs and gradients, gathered from the ranks' local ones."""
    sharding = sharding_of(case, len(ranks))
    gathered = {}
    for name in ("out", "units"):
        values = torch.full(
            (case.length, *ranks[0][0][name].shape[1:]), torch.nan, dtype=torch.float64
        )
        for rank, (local_tensors, *_) in enumerate(ranks):
            indices = torch.tensor(sharding.row_indices(rank))
            values[indices[indices >= 0]] = local_tensors[name][indices >= 0]
        gathered[name] = values
    gathered["weight"] = torch.stack([weight for _, weight, *_ in ranks]).sum(0)
    return gathered


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_state_passing_matches_one_process(cp):
    cases = {(name, kind): Case(kind=kind, **CASES[name]) for name in CASES for kind in KINDS}
    ranks = run_ranks(run_cases, cp, tuple(cases.values()))
    crossed = num_probes = num_split = num_joint = 0
    for (name, kind), case, results in zip(
        cases, cases.values(), zip(*ranks, strict=True), strict=True
    ):
        try:
            assert_all_close(gather_outputs(case, results), reference_outputs(case), bound=1e-11)
        except AssertionError as error:
            raise AssertionError(f"{name}, {kind}, cp {cp}:\n{error}") from error
        crosses = cp > 1 and name != "no document crosses ranks"
        crossed += crosses
        for _, _, (forward, backward), _, prepared in results:
            num_probes += prepared[1:] == [1]  # one token gives the shape of summaries
            num_split += len(prepared) > 1 and 4 * prepared[-1] <= prepared[0]
            num_joint += crosses and len(prepared) == 1
            kinds = ["all_to_all", "all_gather"] if crosses else []
            assert [kind for kind, _ in forward] == kinds, name
            assert [kind for kind, _ in backward] == kinds[::-1], name
    assert crossed == (0 if cp == 1 else 2 * (len(CASES) - 1))
    assert (num_probes > 1, num_split > 2, num_joint > 2) == (cp > 1,) * 3


def draw_case(seed: int) -> Case:
    """Return a random case for 3 ranks."""
    rng = Random(seed)
    row = random_case(rng)
    while row.size != 3 or row.total > 60:
        row = random_case(rng)
    sharding = row.sharding()
    extra_bounds = [rng.sample(range(row.total + 1), min(row.total, n)) for n in (0, 3)]
    return Case(
        kind=rng.choice(KINDS),
        order=row.order,
        documents=tuple(tuple(sorted({*sharding.bounds, *extra})) for extra in extra_bounds),
        bounds=sharding.bounds,
        padded=sharding.padded,
        length=row.total,
    )


@pytest.mark.slow
def test_state_passing_matches_for_random_shardings():
    cases = [draw_case(seed) for seed in range(80)]
    ranks = run_ranks(run_cases, 3, tuple(cases))
    crossed = 0
    for case, results in zip(cases, zip(*ranks, strict=True), strict=True):
        try:
            assert_all_close(gather_outputs(case, results), reference_outputs(case), bound=1e-11)
        except AssertionError as error:
            raise AssertionError(f"{case}:\n{error}") from error
        crossed += bool(results[0][2][0])
    assert crossed > 40


@pytest.mark.parametrize("cp", [2, 4])
def test_sent_bytes_match_formula(cp):
    cases = [Case(kind=kind, order=order) for kind in KINDS for order in ("zigzag", "contiguous")]
    ranks = run_ranks(run_cases, cp, tuple(cases))
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
        sharding = sharding_of(case, cp)
        layout = SequenceLayout.make(sharding, 0, rows=ROWS)
        # All tensors are fp64 here, so states have twice the bytes that the formula counts.
        shape = shape.with_tokens(layout, ROWS, element_bytes=4)
        sent = []
        for _, _, (forward, backward), halo_tokens, _ in results:
            row = GROUPS * CHANNELS * 8
            assert forward[0] == ("all_to_all", halo_tokens[0] * row)
            assert backward[1] == ("all_to_all", halo_tokens[1] * row)
            gathered = (forward[1][1] + backward[0][1]) * (cp - 1) // cp
            sent.append(gathered + 2 * shape.summaries(cp) * (WIDTH - 1) * row)
            max_halo = shape.summaries(cp) * (WIDTH - 1)
            assert halo_tokens[0] <= max_halo
            assert halo_tokens[1] <= max_halo
        assert set(sent) == {2 * sent_bytes("segments", shape, cp)}, case


def run_two_layers(rank: int, world: int):
    """Run two bf16 layers, twice; return host reads, the number of maps, and the collectives."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    case = Case(kind="delta", documents=UNEVEN)
    layout = SequenceLayout.make(
        sharding_of(case, world), rank, rows=ROWS, document_ids=document_ids(case)
    )
    indices = torch.tensor(layout.sharding.row_indices(rank))
    x = local(global_inputs()["units"], indices).bfloat16().requires_grad_()
    for _ in range(2):  # the first pass builds the maps
        with host_reads() as reads, trace(groups) as records:
            local_sequences = layout.local_sequences(ROWS)
            packed, out = local_sequences.pack(x), 0.0
            for _ in range(2):
                halo = halo_rows(packed, local_sequences, groups["cp"], width=3)
                inputs = inputs_of(packed[..., :CHANNELS], packed[..., CHANNELS:])
                recurrence = recurrence_of("delta").operations(inputs)
                out = out + recur_in_segments(recurrence, inputs, local_sequences, groups["cp"])
                out = out + halo.sum()
            torch.autograd.backward((out.sum(),))
    return reads, layout.num_maps, {(record.kind, record.dtype) for record in records}


def test_no_host_reads_and_states_are_sent_in_fp32():
    for reads, maps, sent in run_ranks(run_two_layers, 2):
        assert reads == []
        assert maps == 1
        assert sent == {("all_gather", "float32"), ("all_to_all", "bfloat16")}


def test_layout_of_another_rank_is_refused():
    layout = SequenceLayout.make(SequenceSharding.of(8, 2), 1, rows=1)
    local_sequences = layout.local_sequences(1)
    x = torch.zeros(4, GROUPS, KEYS)
    with pytest.raises(ValueError, match="rank 1 of 2, but group cp is rank 0 of 1"):
        halo_rows(x, local_sequences, Group.single("cp"), width=3)
