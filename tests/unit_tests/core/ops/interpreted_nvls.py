# SPDX-License-Identifier: Apache-2.0
"""Collectives over symmetric memory, between processes that share files as memory."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron.core import Group, ProcessGroupCollection, RankGrid
from megatron.core.comm import trace
from megatron.core.comm.symmetric_memory import (
    Arena,
    SequenceParallelComm,
    SymmetricBuffers,
)
from megatron.core.inference import EngineRequest, generate
from megatron.core.models import GPTModel, InferenceOptimizedModel
from megatron.core.ops.nvls import PeerGroup, RowNorm
from megatron.core.ops.nvls import triton as nvls
from megatron.core.ops.rmsnorm import rms_norm
from megatron.core.transformer import NormConfig
from tests.support.closeness import assert_close_by_metric
from tests.support.inputs import one_thread
from tests.support.ranks import run_ranks
from tests.unit_tests.core.inference.test_engine import FAMILIES, engine_of, requests


class SharedFiles:
    """Symmetric memory of processes on one machine: files that all processes map.

    Args:
        problems: the problem that each rank reports.
        multicast: the multicast problem, of all ranks or by rank.
        fails: error message of the allocation, by rank.
        unmapped: error message of the exchange.
        broken: the rank whose buffers are private memory.
        deaf: the rank whose signal pads are private memory.
        no_address: the rank whose mapping has no multicast address.
        pad_bytes: size of the signal pads that the exchange reports.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        problems: dict[int, str] | None = None,
        multicast: str | dict[int, str] = "no switch",
        fails: dict[int, str] | None = None,
        unmapped: str = "",
        broken: int | None = None,
        deaf: int | None = None,
        no_address: int | None = None,
        pad_bytes: int | None = None,
    ) -> None:
        self.folder, self.rank, self.count = folder, rank, 0
        self.problems, self.multicast, self.fails = problems or {}, multicast, fails or {}
        self.unmapped, self.broken, self.deaf = unmapped, broken, deaf
        self.no_address = no_address
        self.pad_bytes, self.mappings = pad_bytes, []
        self.by_multicast: dict[int, torch.Tensor] = {}

    def problem(self) -> str:
        return self.problems.get(self.rank, "")

    def multicast_problem(self) -> str:
        problem = self.multicast
        return problem if isinstance(problem, str) else problem.get(self.rank, "")

    def allocate(self, size: int, pad_bytes: int) -> torch.Tensor:
        if self.rank in self.fails:
            raise RuntimeError(self.fails[self.rank])
        self.sizes = size, pad_bytes
        return torch.empty(0)

    def exchange(self, local: torch.Tensor, group: Group) -> SymmetricBuffers:
        if self.unmapped:
            raise RuntimeError(self.unmapped)
        self.count, (size, pad_bytes) = self.count + 1, self.sizes
        buffers = [self._mapped(f"{self.count}-{r}", size) for r in range(group.size)]
        pads = [self._mapped(f"{self.count}-{r}-pad", pad_bytes) for r in range(group.size)]
        torch.distributed.barrier(group.handle)
        if self.broken == self.rank:
            buffers = [torch.zeros_like(buffer) for buffer in buffers]
        if self.deaf == self.rank:
            pads = [torch.zeros_like(pad) for pad in pads]
        local = buffers[self.rank]
        local.view(torch.float32).fill_(float("nan"))
        self.mappings.append((buffers, pads))
        torch.distributed.barrier(group.handle)
        addresses = torch.tensor([x.data_ptr() for x in buffers])
        self.by_multicast[self.count] = addresses
        return SymmetricBuffers(
            local=local,
            buffers=addresses,
            pads=torch.tensor([x.data_ptr() for x in pads]),
            pad_bytes=self.pad_bytes or pad_bytes,
            multicast=self._multicast_address,
            owner=(buffers, pads),
        )

    @property
    def _multicast_address(self) -> int:
        """Return the address of the newest buffers for `by_multicast`, which is never 0."""
        return 0 if self.multicast == "no switch" or self.no_address == self.rank else self.count

    def _mapped(self, name: str, size: int) -> torch.Tensor:
        """Map the bytes of a file; a new file holds zeros."""
        path = str(self.folder / name)
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def multicast_by_peers(memory: SharedFiles) -> None:
    """Replace the multimem kernels by peer-to-peer kernels over the addresses of all ranks."""
    addresses = memory.by_multicast

    def all_gather(x, multicast, peers):
        nvls.peer_all_gather(x, addresses[multicast], peers)

    def reduce_scatter(multicast, out, peers):
        nvls.peer_reduce_scatter(addresses[multicast], out, peers)

    def fused(multicast, gathered, stream, norm, peers):
        nvls.peer_reduce_norm_gather(addresses[multicast], addresses[gathered], stream, norm, peers)

    def all_gather_v(x, rows, multicast, out, peers):
        nvls.peer_all_gather_v(x, rows, addresses[multicast], out, peers)

    def reduce_scatter_v(multicast, rows, out, peers):
        nvls.peer_reduce_scatter_v(addresses[multicast], rows, out, peers)

    nvls.multimem_all_gather, nvls.multimem_reduce_scatter = all_gather, reduce_scatter
    nvls.multimem_all_gather_v, nvls.multimem_reduce_scatter_v = all_gather_v, reduce_scatter_v
    nvls.multimem_reduce_norm_gather = fused


def make_groups(rank: int, world: int) -> tuple[ProcessGroupCollection, Group]:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    return groups, groups["tp"]


def addends(world: int, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return integer addends of all ranks; their sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-50, 50, (world, *shape), generator=generator).float()


def run_rounds(rank: int, world: int, folder: str, features: int, rounds: int) -> int:
    groups, group = make_groups(rank, world)
    memory, delays = SharedFiles(Path(folder), rank), random.Random(rank)
    rows = 2
    comm = SequenceParallelComm.create(group, memory, max_bytes=4 * world * rows * features)
    assert comm.way == "p2p"
    assert "no switch" in comm.explain()
    for number in range(rounds):
        inputs = addends(world, (world * rows, features), number)
        total = inputs.sum(0)
        time.sleep(delays.random() * 0.01)
        with trace(groups) as records:
            shard = comm.reduce_scatter(inputs[rank])
            gathered_sum = comm.all_gather(shard)
        assert [record.how for record in records] == ["p2p", "p2p"]
        assert torch.equal(shard, total.chunk(world)[rank])
        assert torch.equal(gathered_sum, total)
        time.sleep(delays.random() * 0.01)
        # Two gathers in a row: a late reader must not read data of the second gather.
        for offset in (1, 2):
            gathered = comm.all_gather(shard + offset)
            time.sleep(delays.random() * 0.01)
            assert torch.equal(gathered, total + offset)
    torch.distributed.barrier(group.handle)
    return sum(int(pad.sum()) for _, pads in memory.mappings for pad in pads)


@pytest.mark.parametrize(("world", "features"), [(2, 64), (2, 1152), (4, 64)])
def test_collectives_are_exact_and_reset_signal_pads(
    world: int, features: int, tmp_path: Path
) -> None:
    assert run_ranks(run_rounds, world, str(tmp_path), features, 5) == [0] * world


@pytest.mark.slow
@pytest.mark.parametrize(("world", "rounds"), [(2, 1000), (4, 30)])
def test_many_rounds_are_exact(world: int, rounds: int, tmp_path: Path) -> None:
    pad_sums = run_ranks(run_rounds, world, str(tmp_path), 64, rounds, timeout=400)
    assert pad_sums == [0] * world


#: Row counts of two ranks whose buffers hold three rows.
ROW_COUNTS = ((2, 1), (0, 3), (0, 0), (3, 0))


def run_ragged(
    rank: int, world: int, folder: str, features: int, options_by_backend: dict
) -> list[str]:
    """Return the errors of each backend with unequal row counts."""
    groups, group = make_groups(rank, world)
    delays, errors, room = random.Random(rank), [], 3
    for backend, options in options_by_backend.items():
        (Path(folder) / backend).mkdir(exist_ok=True)
        memory = SharedFiles(Path(folder) / backend, rank, **options)
        multicast_by_peers(memory)
        comm = SequenceParallelComm.create(group, memory, max_bytes=4 * world * room * features)
        assert comm.way == backend
        for number, counts in enumerate(ROW_COUNTS if backend == "p2p" else ROW_COUNTS[:1]):
            inputs = addends(world, (room, features), number)
            total = torch.cat([p[:c] for p, c in zip(inputs, counts, strict=True)])
            total = torch.cat([total, torch.zeros(world * room - len(total), features)])
            local_rows, row_offset = inputs[rank].clone(), sum(counts[:rank])
            local_rows[counts[rank] :] = float("nan")  # unused rows
            sums = addends(world, total.shape, 50 + number)
            expected_shard = torch.zeros(room, features)
            expected_shard[: counts[rank]] = sums.sum(0)[row_offset : row_offset + counts[rank]]
            sums[:, sum(counts) :] = float("nan")
            rows = torch.tensor(counts, dtype=torch.int32)
            time.sleep(delays.random() * 0.01)
            with trace(groups) as records:
                first_gather = comm.all_gather_v(local_rows, rows)
                time.sleep(delays.random() * 0.01)
                # A late copy must not hold data of the next gather.
                first_gather = first_gather.clone()
                second_gather = comm.all_gather_v(2 * local_rows, rows).clone()
                time.sleep(delays.random() * 0.01)
                summed = comm.reduce_scatter_v(sums[rank], rows)
            if backend != "torch.distributed":
                assert [record.how for record in records] == [f"{backend} v"] * 3
            if not (torch.equal(first_gather, total) and torch.equal(second_gather, 2 * total)):
                errors.append(f"{backend}: gather of {counts}")
            if not torch.equal(summed, expected_shard):
                errors.append(f"{backend}: scatter of {counts}")
        torch.distributed.barrier(group.handle)
        if any(int(pad.sum()) for _, pads in memory.mappings for pad in pads):
            errors.append(f"{backend}: pads")
    return errors


def test_collectives_support_unequal_row_counts(tmp_path: Path) -> None:
    ways = {"p2p": {}, "multimem": {"multicast": {}}, "torch.distributed": {"unmapped": "no"}}
    assert run_ranks(run_ragged, 2, str(tmp_path), 1152, ways) == [[]] * 2


def run_fused(rank: int, world: int, folder: str, features: int) -> list[str]:
    """Return the errors of the fused kernel for 1 and 3 rows per rank, and of gathers around it."""
    groups, group = make_groups(rank, world)
    memory, errors = SharedFiles(Path(folder), rank), []
    comm = SequenceParallelComm.create(group, memory, max_bytes=4 * world * 3 * features)
    norm = RowNorm(torch.linspace(-1, 1, features), 1e-5, 1.0)
    for rows in (1, 3, 1):
        inputs = addends(world, (world * rows, features), rows)
        streams = addends(1, (world * rows, features), 7)[0]
        total = streams + inputs.sum(0)
        expected = rms_norm(total.double(), norm.weight.double(), eps=1e-5, zero_centered=True)
        assert comm.fuses(inputs[rank])
        stream = streams.chunk(world)[rank].clone()
        if not torch.equal(comm.all_gather(stream), streams):
            errors.append(f"gather before {rows} rows")
        with trace(groups) as records:
            normed = comm.reduce_norm_gather(inputs[rank], stream, norm)
        assert [(r.kind, r.how) for r in records] == [
            ("reduce_scatter", "p2p fused"),
            ("all_gather", "p2p fused"),
        ]
        assert_close_by_metric(f"norm of {rows} rows", normed, expected, bound=1e-6)
        if not torch.equal(stream, total.chunk(world)[rank]):
            errors.append(f"stream of {rows} rows")
        if not torch.equal(comm.all_gather(stream), total):
            errors.append(f"gather after {rows} rows")
    torch.distributed.barrier(group.handle)
    if any(int(pad.sum()) for _, pads in memory.mappings for pad in pads):
        errors.append("pads")
    return errors


@pytest.mark.parametrize(
    ("world", "features"), [(2, 64), (4, 128), (2, 1152), (2, 9216), (4, 12288)]
)
def test_fused_kernel_matches_reduce_add_norm_gather(
    world: int, features: int, tmp_path: Path
) -> None:
    assert run_ranks(run_fused, world, str(tmp_path), features) == [[]] * world


@pytest.mark.parametrize("features", [4, 64, 128, 1152, 9216, 12288, 16384])
def test_norm_launch_fits_a_row_into_a_block(features: int) -> None:
    peers = PeerGroup(torch.zeros(2), torch.zeros(1), rank=0, world=2, programs=32)
    norm = RowNorm(torch.ones(features), 1e-5)
    (programs,), launch = nvls._norm_launch(torch.zeros(1, features), norm, peers)
    assert programs == 1
    assert launch["num_warps"] in (1, 2, 4, 8, 16)
    assert features <= launch["BLOCK"] <= launch["num_warps"] * 1024


def choose_backend(rank: int, world: int, folder: str, options: dict) -> tuple[str, str, bool]:
    """Return the backend, its explanation, and whether its sums are correct."""
    _, group = make_groups(rank, world)
    memory = SharedFiles(Path(folder), rank, **options)
    multicast_by_peers(memory)
    comm = SequenceParallelComm.create(group, memory, max_bytes=4096, tries=200)
    inputs = addends(world, (world * 2, 32), 1)
    shard = comm.reduce_scatter(inputs[rank])
    is_correct = torch.equal(shard, inputs.sum(0).chunk(world)[rank])
    return (
        comm.way,
        comm.explain(),
        is_correct and torch.equal(comm.all_gather(shard), inputs.sum(0)),
    )


@pytest.mark.parametrize(
    ("options", "backend", "reason"),
    [
        ({"problems": {1: "torch has none"}}, "torch.distributed", "rank 1: torch has none"),
        ({"fails": {0: "full"}}, "torch.distributed", "rank 0: no symmetric memory of 8,192 bytes"),
        ({"unmapped": "fd 7"}, "torch.distributed", "map each other's memory: fd 7"),
        ({"broken": 1}, "torch.distributed", "rank 0: p2p: the probe's sum differs from torch"),
        ({"deaf": 1}, "torch.distributed", "did not take part in the probe"),
        ({"multicast": {1: "no switch there"}}, "p2p", "rank 1: no switch there"),
        ({"multicast": {}}, "multimem", ""),
        ({"multicast": {}, "no_address": 1}, "p2p", "rank 1: the ranks' devices are not in one"),
        ({"multicast": {}, "broken": 0}, "torch.distributed", "multimem: the probe's sum"),
    ],
)
def test_ranks_agree_on_the_best_common_backend(
    options: dict, backend: str, reason: str, tmp_path: Path
) -> None:
    reports = run_ranks(choose_backend, 2, str(tmp_path), options)
    assert [report[0] for report in reports] == [backend, backend]
    assert all(is_correct for *_, is_correct in reports)
    assert len({explanation for _, explanation, _ in reports}) == 1
    assert reason in reports[0][1]


class OddTransferCount(InferenceOptimizedModel):
    """A model whose steps each start after an odd number of transfers."""

    def __call__(self, *args, **kwargs):
        while self.comm.addends((4, 64), torch.float32).data_ptr() == self.first_address:
            self.comm.all_gather(torch.ones(2, 64))
        return super().__call__(*args, **kwargs)


def check_first_buffers(rank: int, world: int, folder: str) -> tuple[list[bool], list[bool], list]:
    """Check the use of the first buffer.

    Returns:
        Whether the first buffer is next at the start, after a gather, after `begin_step`; whether
        the first reduction of each step uses it; the generated tokens.
    """
    groups, group = make_groups(rank, world)
    comm = SequenceParallelComm.create(group, SharedFiles(Path(folder), rank), max_bytes=1 << 16)
    assert comm.way == "p2p"
    addresses = []
    for action in (None, lambda: comm.all_gather(torch.ones(2, 64)), comm.begin_step):
        if action is not None:
            action()
        addresses.append(comm.addends((4, 64), torch.float32).data_ptr())
    model = OddTransferCount(model_in_fp32("gqa", groups, sequence_parallel=True), comm)
    model.first_address = addresses[0]
    engine = engine_of(model.model, max_num_batched_tokens=500, token_multiple=world)
    engine.runner.model = model
    uses_first_buffer, first_reductions = [], []
    fill_next, call = Arena._fill_next, OddTransferCount.__call__

    def recording_fill(arena: Arena, x: torch.Tensor, how: str) -> SymmetricBuffers:
        uses_first_buffer.append(arena.next_addends((1,), torch.float32).data_ptr() == addresses[0])
        return fill_next(arena, x, how)

    def step(self, *args, **named):
        num_used = len(uses_first_buffer)
        output = call(self, *args, **named)
        first_reductions.append(uses_first_buffer[num_used])
        return output

    with (
        one_thread(),
        mock.patch.object(Arena, "_fill_next", recording_fill),
        mock.patch.object(OddTransferCount, "__call__", step),
    ):
        outputs = generate(engine, make_requests()[:1])
    return [a == addresses[0] for a in addresses], first_reductions, [c.tokens for (c,) in outputs]


def test_every_step_starts_with_the_first_buffer(tmp_path: Path) -> None:
    with one_thread():
        model = model_in_fp32("gqa", ProcessGroupCollection.single())
        expected = [c.tokens for (c,) in generate(engine_of(model), make_requests()[:1])]
    for next_is_first, first_reductions, tokens in run_ranks(check_first_buffers, 2, str(tmp_path)):
        assert next_is_first == [True, False, True]
        assert len(first_reductions) >= 4
        assert all(first_reductions)
        assert tokens == expected


def require_multicast(rank: int, world: int, folder: str, options: dict) -> str:
    _, group = make_groups(rank, world)
    memory = SharedFiles(Path(folder), rank, **options)
    multicast_by_peers(memory)
    try:
        comm = SequenceParallelComm.create(group, memory, max_bytes=64, mode="require")
    except ValueError as error:
        return str(error)
    return comm.way


def test_require_uses_multicast_or_fails_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "with").mkdir()
    backends = run_ranks(require_multicast, 2, str(tmp_path / "with"), {"multicast": {}})
    assert backends == ["multimem", "multimem"]
    errors = run_ranks(require_multicast, 2, str(tmp_path), {"multicast": {1: "no switch"}})
    assert errors[0] == errors[1]
    assert "--nvls require: the collectives would go through p2p (rank 1: no switch)" in errors[0]


def run_families(
    rank: int, world: int, folder: str, options_by_family: dict[str, dict]
) -> dict[str, tuple]:
    """Return by family the generated tokens, collectives by backend, the backend and steps."""
    groups, group = make_groups(rank, world)
    reports = {}
    for family, options in options_by_family.items():
        model = model_in_fp32(family, groups, sequence_parallel=True)
        (Path(folder) / family).mkdir(exist_ok=True)
        memory = SharedFiles(Path(folder) / family, rank, **options.get("memory", {}))
        multicast_by_peers(memory)
        comm = SequenceParallelComm.create(
            group, memory, max_bytes=options.get("max_bytes", 1 << 16)
        )
        engine = engine_of(model, max_num_batched_tokens=500, token_multiple=world)
        engine.runner.model = InferenceOptimizedModel(model, comm)
        with one_thread(), trace(groups) as records, copies_into_arenas() as copied:
            outputs_by_request = generate(engine, make_requests())
        collectives = Counter((record.kind, record.how) for record in records)
        collectives["copied", comm.way] = copied.count(True)
        reports[family] = (
            [outputs[0].tokens for outputs in outputs_by_request],
            collectives,
            comm.way,
            engine.stats.steps,
        )
    return reports


@contextmanager
def copies_into_arenas() -> Iterator[list[bool]]:
    """Record for each reduction whether its addends were copied into symmetric memory."""
    copied, fill_next = [], Arena._fill_next

    def recording_fill(arena: Arena, x: torch.Tensor, how: str) -> SymmetricBuffers:
        copied.append(x.data_ptr() != arena.next_addends(x.shape, x.dtype).data_ptr())
        return fill_next(arena, x, how)

    Arena._fill_next = recording_fill
    try:
        yield copied
    finally:
        Arena._fill_next = fill_next


def make_requests() -> list[EngineRequest]:
    """Return three requests of a few tokens, as the interpreter is slow."""
    return [replace(request, max_new_tokens=4) for request in requests()[:3]]


def model_in_fp32(family: str, groups: ProcessGroupCollection, **layout: bool) -> GPTModel:
    return GPTModel(CONFIGS[family], groups, dtype=torch.float32, seed=3, **layout)


CONFIGS = {family: replace(config, norm=NormConfig()) for family, config in FAMILIES.items()} | {
    "norms of outputs": replace(FAMILIES["gqa"], norm=NormConfig(placement="both")),
    "layer norm": replace(FAMILIES["gqa"], norm=NormConfig(kind="LayerNorm")),
    "zero centred": replace(FAMILIES["gqa"], norm=NormConfig(zero_centered=True)),
}
#: By family: options of the memory, and the expected backend.
BACKENDS = {
    "gqa": ({}, "p2p"),
    "zero centred": ({"memory": {"multicast": {}}}, "multimem"),
    "hybrid": ({}, "p2p"),
    "experts": ({}, "p2p"),
    "layer norm": ({}, "p2p"),
    "norms of outputs": ({}, "p2p"),
    "window and sinks": ({"max_bytes": 500}, "p2p"),
    "latent": ({"memory": {"problems": {0: "none"}}}, "torch.distributed"),
}


def test_optimized_forward_generates_same_tokens_on_all_backends(tmp_path: Path) -> None:
    options_by_family = {family: options for family, (options, _) in BACKENDS.items()}
    reports = run_ranks(run_families, 2, str(tmp_path), options_by_family, timeout=240)
    for family, (options, expected_backend) in BACKENDS.items():
        model = model_in_fp32(family, ProcessGroupCollection.single())
        with one_thread():
            expected = [
                outputs[0].tokens
                for outputs in generate(
                    engine_of(model, max_num_batched_tokens=500), make_requests()
                )
            ]
        for report in reports:
            tokens, collectives, backend, steps = report[family]
            assert (tokens, backend) == (expected, expected_backend), family
            fused = collectives["reduce_scatter", f"{expected_backend} fused"]
            assert collectives["all_gather", f"{expected_backend} fused"] == fused
            if family in ("gqa", "zero centred"):
                # Unfused: the embedding's reduce-scatter and one gather before the first block.
                assert fused == 4 * steps
                assert (
                    collectives["reduce_scatter", expected_backend]
                    == collectives["all_gather", expected_backend]
                    == steps
                )
                # Only the embedding is copied; matmuls write into symmetric memory.
                assert collectives["copied", expected_backend] == steps
            elif family in ("layer norm", "norms of outputs"):
                assert (fused, collectives["reduce_scatter", expected_backend]) == (0, 5 * steps)
                assert collectives["copied", expected_backend] == steps
            elif "max_bytes" in options:  # only the prompt step exceeds the memory
                assert 0 < fused < 4 * steps
                assert collectives["reduce_scatter", "sum"] > 0
            elif expected_backend == "torch.distributed":
                assert not any(backend.startswith("p2p") for _, backend in collectives)
            else:
                assert fused >= steps
            # The expert block, in each decode-only step, with an odd number of tokens.
            experts = steps - 1 if family == "experts" else 0
            assert collectives["all_gather", f"{expected_backend} v"] == experts
            assert collectives["reduce_scatter", f"{expected_backend} v"] == experts


def wait_for_missing_peer(rank: int, world: int, folder: str) -> tuple[int, str]:
    _, group = make_groups(rank, world)
    memory = SharedFiles(Path(folder), rank)
    buffers = memory.exchange(memory.allocate(1024, 512), group)
    arena = Arena(group, (buffers, buffers), "p2p", tries=50)
    if rank == 0:
        arena.reduce_scatter(torch.ones(world * 4, 4))
    try:
        arena.check()
    except RuntimeError as error:
        return int(arena.status), str(error)
    return int(arena.status), ""


def test_missing_peer_is_named(tmp_path: Path) -> None:
    (status, error), peer_report = run_ranks(wait_for_missing_peer, 2, str(tmp_path))
    assert (status, peer_report) == (2, (0, ""))
    assert "rank 1 did not reach a collective of p2p within 50 polls" in error


def run_with_limit(rank: int, world: int, folder: str) -> tuple[str, list[str]]:
    """Return the error of a step with a spin limit after a rank left, and the log lines."""
    groups, group = make_groups(rank, world)
    model, lines = model_in_fp32("gqa", groups, sequence_parallel=True), []
    memory = SharedFiles(Path(folder), rank)
    comm = SequenceParallelComm.create(group, memory, max_bytes=500, limit=200)
    engine = engine_of(model, max_num_batched_tokens=500, token_multiple=world)
    engine.runner.model = InferenceOptimizedModel(model, comm)
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("megatron.core.comm.symmetric_memory").addHandler(handler)
    for request in make_requests():
        engine.add(request)
    with one_thread():
        engine.step()  # the prompt step, which exceeds the memory
        if rank == 1:
            return "", lines
        try:
            engine.step()
        except RuntimeError as error:
            return str(error), lines
    return "", lines


def test_spin_limit_names_missing_peer_and_oversized_message(tmp_path: Path) -> None:
    (error, lines), (_, peer_lines) = run_ranks(run_with_limit, 2, str(tmp_path))
    assert "rank 1 did not reach a collective of p2p within 200 polls" in error
    assert len(lines) == 1
    assert "exceeds the 512 bytes of symmetric memory" in lines[0]
    assert not peer_lines


def gather_strided(rank: int, world: int, folder: str) -> bool:
    _, group = make_groups(rank, world)
    comm = SequenceParallelComm.create(group, SharedFiles(Path(folder), rank), max_bytes=1 << 16)
    inputs = addends(world, (world * 4, 32), 3)
    columns = inputs.transpose(1, 2).contiguous().transpose(1, 2)[rank]
    shard = comm.reduce_scatter(columns)
    misaligned = torch.empty(shard.numel() + 1)[1:].view(shard.shape).copy_(shard)  # 4 bytes off
    column_major = shard.t().contiguous().t()
    total = inputs.sum(0)
    return all(torch.equal(comm.all_gather(x), total) for x in (shard, misaligned, column_major))


def test_strided_and_misaligned_inputs_are_gathered(tmp_path: Path) -> None:
    assert run_ranks(gather_strided, 2, str(tmp_path)) == [True, True]


@pytest.mark.parametrize("world", [2, 18, 19, 72])
def test_programs_fit_the_signal_pad(world: int) -> None:
    buffers = SymmetricBuffers(
        torch.zeros(16, dtype=torch.uint8), torch.zeros(world), torch.zeros(world), 9216, 0
    )
    group = Group("tp", tuple(range(world)), 0, handle=object())
    arena = Arena(group, (buffers, buffers), "p2p")
    assert arena.programs * world * 4 <= 9216
    assert arena.programs >= 1
