# SPDX-License-Identifier: Apache-2.0
"""Collectives over symmetric memory, peer to peer, by processes that share files as memory."""

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

from megatron.core.comm import trace
from megatron.core.comm.symmetric_memory import (
    Arena,
    SequenceParallelComm,
    SymmetricBuffers,
)
from megatron.core.inference.engine import Request, generate
from megatron.core.models.gpt import GPTModel
from megatron.core.models.inference_optimized import InferenceOptimizedModel
from megatron.core.ops.nvls import PeerGroup, RowNorm
from megatron.core.ops.nvls import triton as nvls
from megatron.core.ops.rmsnorm import rms_norm
from megatron.core.process_groups import Group, ProcessGroupCollection, RankGrid
from megatron.core.transformer import NormConfig
from tests.support.closeness import assert_close_by_metric
from tests.support.inputs import one_thread
from tests.support.ranks import run_ranks
from tests.unit_tests.core.inference.test_engine import FAMILIES, engine_of, requests


class Files:
    """Symmetric memory of processes on one machine: files that all of them map.

    Args:
        problems: what each rank says it lacks.
        multicast: what each rank says it lacks of multicast.
        fails: what a rank's allocation raises.
        unmapped: what the exchange raises.
        broken: the buffers of this rank are memory of its own.
        deaf: so are its signal pads.
        no_address: this rank's mapping has no multicast address.
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
        self.pad_bytes, self.kept = pad_bytes, []
        self.by_multicast: dict[int, torch.Tensor] = {}

    def problem(self) -> str:
        return self.problems.get(self.rank, "")

    def multicast_problem(self) -> str:
        said = self.multicast
        return said if isinstance(said, str) else said.get(self.rank, "")

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
        self.kept.append((buffers, pads))
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
        """Return a file's bytes; a new file has zeros."""
        path = str(self.folder / name)
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def multicast_by_peers(memory: Files) -> None:
    """Have the kernels of multimem do the same through the addresses of all ranks."""
    there = memory.by_multicast

    def all_gather(x, multicast, peers):
        nvls.peer_all_gather(x, there[multicast], peers)

    def reduce_scatter(multicast, out, peers):
        nvls.peer_reduce_scatter(there[multicast], out, peers)

    def fused(multicast, gathered, stream, norm, peers):
        nvls.peer_reduce_norm_gather(there[multicast], there[gathered], stream, norm, peers)

    def all_gather_v(x, rows, multicast, out, peers):
        nvls.peer_all_gather_v(x, rows, there[multicast], out, peers)

    def reduce_scatter_v(multicast, rows, out, peers):
        nvls.peer_reduce_scatter_v(there[multicast], rows, out, peers)

    nvls.multimem_all_gather, nvls.multimem_reduce_scatter = all_gather, reduce_scatter
    nvls.multimem_all_gather_v, nvls.multimem_reduce_scatter_v = all_gather_v, reduce_scatter_v
    nvls.multimem_reduce_norm_gather = fused


def group_of(rank: int, world: int) -> tuple[ProcessGroupCollection, Group]:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    return groups, groups["tp"]


def addends(world: int, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return what every rank has, integers, so that any order of summation gives the same."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(-50, 50, (world, *shape), generator=made).float()


def rounds_on_a_rank(rank: int, world: int, folder: str, features: int, rounds: int) -> int:
    groups, group = group_of(rank, world)
    memory, delays = Files(Path(folder), rank), random.Random(rank)
    rows = 2
    comm = SequenceParallelComm.create(group, memory, max_bytes=4 * world * rows * features)
    assert comm.way == "p2p"
    assert "no switch" in comm.explain()
    for number in range(rounds):
        whole = addends(world, (world * rows, features), number)
        total = whole.sum(0)
        time.sleep(delays.random() * 0.01)
        with trace(groups) as records:
            own = comm.reduce_scatter(whole[rank])
            everything = comm.all_gather(own)
        assert [record.how for record in records] == ["p2p", "p2p"]
        assert torch.equal(own, total.chunk(world)[rank])
        assert torch.equal(everything, total)
        time.sleep(delays.random() * 0.01)
        # Gather after gather: a rank that is late to read finds nothing of the second.
        for more in (1, 2):
            gathered = comm.all_gather(own + more)
            time.sleep(delays.random() * 0.01)
            assert torch.equal(gathered, total + more)
    torch.distributed.barrier(group.handle)
    return sum(int(pad.sum()) for _, pads in memory.kept for pad in pads)


@pytest.mark.parametrize(("world", "features"), [(2, 64), (2, 1152), (4, 64)])
def test_rounds_are_exact_and_leave_pads_at_zero(world: int, features: int, tmp_path: Path) -> None:
    assert run_ranks(rounds_on_a_rank, world, str(tmp_path), features, 5) == [0] * world


@pytest.mark.slow
@pytest.mark.parametrize(("world", "rounds"), [(2, 1000), (4, 30)])
def test_many_rounds_are(world: int, rounds: int, tmp_path: Path) -> None:
    found = run_ranks(rounds_on_a_rank, world, str(tmp_path), 64, rounds, timeout=400)
    assert found == [0] * world


#: Rows that two ranks have of the three that there is room for.
ROWS = ((2, 1), (0, 3), (0, 0), (3, 0))


def ragged_on_a_rank(rank: int, world: int, folder: str, features: int, ways: dict) -> list[str]:
    """Return what is wrong over some ways with ranks of unlike numbers of rows."""
    groups, group = group_of(rank, world)
    delays, wrong, room = random.Random(rank), [], 3
    for way, how in ways.items():
        (Path(folder) / way).mkdir(exist_ok=True)
        memory = Files(Path(folder) / way, rank, **how)
        multicast_by_peers(memory)
        comm = SequenceParallelComm.create(group, memory, max_bytes=4 * world * room * features)
        assert comm.way == way
        for number, counts in enumerate(ROWS if way == "p2p" else ROWS[:1]):
            parts = addends(world, (room, features), number)
            total = torch.cat([p[:c] for p, c in zip(parts, counts, strict=True)])
            total = torch.cat([total, torch.zeros(world * room - len(total), features)])
            own, first = parts[rank].clone(), sum(counts[:rank])
            own[counts[rank] :] = float("nan")  # rows that are none
            sums = addends(world, total.shape, 50 + number)
            part = torch.zeros(room, features)
            part[: counts[rank]] = sums.sum(0)[first : first + counts[rank]]
            sums[:, sum(counts) :] = float("nan")
            rows = torch.tensor(counts, dtype=torch.int32)
            time.sleep(delays.random() * 0.01)
            with trace(groups) as records:
                once = comm.all_gather_v(own, rows)
                time.sleep(delays.random() * 0.01)
                once = once.clone()  # late: nothing of the next gather is there
                twice = comm.all_gather_v(2 * own, rows).clone()
                time.sleep(delays.random() * 0.01)
                summed = comm.reduce_scatter_v(sums[rank], rows)
            if way != "torch.distributed":
                assert [record.how for record in records] == [f"{way} v"] * 3
            if not (torch.equal(once, total) and torch.equal(twice, 2 * total)):
                wrong.append(f"{way}: gather of {counts}")
            if not torch.equal(summed, part):
                wrong.append(f"{way}: scatter of {counts}")
        torch.distributed.barrier(group.handle)
        if any(int(pad.sum()) for _, pads in memory.kept for pad in pads):
            wrong.append(f"{way}: pads")
    return wrong


def test_ranks_of_unlike_rows_gather_and_scatter_them(tmp_path: Path) -> None:
    ways = {"p2p": {}, "multimem": {"multicast": {}}, "torch.distributed": {"unmapped": "no"}}
    assert run_ranks(ragged_on_a_rank, 2, str(tmp_path), 1152, ways) == [[]] * 2


def fused_on_a_rank(rank: int, world: int, folder: str, features: int) -> list[str]:
    """Return what is wrong with the fused kernel for 1 and 3 rows a rank, gather before and after
    it."""
    groups, group = group_of(rank, world)
    memory, wrong = Files(Path(folder), rank), []
    comm = SequenceParallelComm.create(group, memory, max_bytes=4 * world * 3 * features)
    norm = RowNorm(torch.linspace(-1, 1, features), 1e-5, 1.0)
    for rows in (1, 3, 1):
        whole = addends(world, (world * rows, features), rows)
        streams = addends(1, (world * rows, features), 7)[0]
        total = streams + whole.sum(0)
        wanted = rms_norm(total.double(), norm.weight.double(), eps=1e-5, zero_centered=True)
        assert comm.fuses(whole[rank])
        stream = streams.chunk(world)[rank].clone()
        if not torch.equal(comm.all_gather(stream), streams):
            wrong.append(f"gather before {rows} rows")
        with trace(groups) as records:
            normed = comm.reduce_norm_gather(whole[rank], stream, norm)
        assert [(r.kind, r.how) for r in records] == [
            ("reduce_scatter", "p2p fused"),
            ("all_gather", "p2p fused"),
        ]
        assert_close_by_metric(f"norm of {rows} rows", normed, wanted, bound=1e-6)
        if not torch.equal(stream, total.chunk(world)[rank]):
            wrong.append(f"stream of {rows} rows")
        if not torch.equal(comm.all_gather(stream), total):
            wrong.append(f"gather after {rows} rows")
    torch.distributed.barrier(group.handle)
    if any(int(pad.sum()) for _, pads in memory.kept for pad in pads):
        wrong.append("pads")
    return wrong


@pytest.mark.parametrize(
    ("world", "features"), [(2, 64), (4, 128), (2, 1152), (2, 9216), (4, 12288)]
)
def test_the_fused_kernel_is_reduce_add_norm_and_gather(
    world: int, features: int, tmp_path: Path
) -> None:
    assert run_ranks(fused_on_a_rank, world, str(tmp_path), features) == [[]] * world


@pytest.mark.parametrize("features", [4, 64, 128, 1152, 9216, 12288, 16384])
def test_a_row_has_a_warp_and_a_place(features: int) -> None:
    peers = PeerGroup(torch.zeros(2), torch.zeros(1), rank=0, world=2, programs=32)
    norm = RowNorm(torch.ones(features), 1e-5)
    (programs,), launch = nvls._norm_launch(torch.zeros(1, features), norm, peers)
    assert programs == 1
    assert launch["num_warps"] in (1, 2, 4, 8, 16)
    assert features <= launch["BLOCK"] <= launch["num_warps"] * 1024


def tries_a_way(rank: int, world: int, folder: str, what: dict) -> tuple[str, str, bool]:
    """Return the way, why, and whether its sums are right."""
    _, group = group_of(rank, world)
    memory = Files(Path(folder), rank, **what)
    multicast_by_peers(memory)
    comm = SequenceParallelComm.create(group, memory, max_bytes=4096, tries=200)
    whole = addends(world, (world * 2, 32), 1)
    own = comm.reduce_scatter(whole[rank])
    right = torch.equal(own, whole.sum(0).chunk(world)[rank])
    return comm.way, comm.explain(), right and torch.equal(comm.all_gather(own), whole.sum(0))


@pytest.mark.parametrize(
    ("what", "way", "reason"),
    [
        ({"problems": {1: "torch has none"}}, "torch.distributed", "rank 1: torch has none"),
        ({"fails": {0: "full"}}, "torch.distributed", "rank 0: no symmetric memory of 8,192 bytes"),
        ({"unmapped": "fd 7"}, "torch.distributed", "map each other's memory: fd 7"),
        ({"broken": 1}, "torch.distributed", "rank 0: p2p: the probe's sum is not that of torch"),
        ({"deaf": 1}, "torch.distributed", "did not take part in the probe"),
        ({"multicast": {1: "no switch there"}}, "p2p", "rank 1: no switch there"),
        ({"multicast": {}}, "multimem", ""),
        ({"multicast": {}, "no_address": 1}, "p2p", "rank 1: the ranks' devices are not in one"),
        ({"multicast": {}, "broken": 0}, "torch.distributed", "multimem: the probe's sum"),
    ],
)
def test_all_ranks_take_the_way_that_every_one_can(
    what: dict, way: str, reason: str, tmp_path: Path
) -> None:
    found = run_ranks(tries_a_way, 2, str(tmp_path), what)
    assert [each[0] for each in found] == [way, way]
    assert all(right for *_, right in found)
    assert len({said for _, said, _ in found}) == 1
    assert reason in found[0][1]


class OddTransferCount(InferenceOptimizedModel):
    """A model each of whose steps begins after an odd number of transfers."""

    def __call__(self, *args, **named):
        while self.comm.addends((4, 64), torch.float32).data_ptr() == self.first:
            self.comm.all_gather(torch.ones(2, 64))
        return super().__call__(*args, **named)


def first_buffers(rank: int, world: int, folder: str) -> tuple[list[bool], list[bool], list]:
    """Return whether the first buffer is next at first, after a gather and after `begin_step`;
    whether the first reduction of each step uses it; and what is generated."""
    groups, group = group_of(rank, world)
    comm = SequenceParallelComm.create(group, Files(Path(folder), rank), max_bytes=1 << 16)
    assert comm.way == "p2p"
    addresses = []
    for before in (None, lambda: comm.all_gather(torch.ones(2, 64)), comm.begin_step):
        if before is not None:
            before()
        addresses.append(comm.addends((4, 64), torch.float32).data_ptr())
    model = OddTransferCount(model_in_fp32("gqa", groups, sequence_parallel=True), comm)
    model.first = addresses[0]
    engine = engine_of(model.model, max_num_batched_tokens=500, token_multiple=world)
    engine.model = model
    used, begins = [], []
    filled, call = Arena._fill_next, OddTransferCount.__call__

    def noted(arena: Arena, x: torch.Tensor, how: str) -> SymmetricBuffers:
        used.append(arena.next_addends((1,), torch.float32).data_ptr() == addresses[0])
        return filled(arena, x, how)

    def step(self, *args, **named):
        start = len(used)
        found = call(self, *args, **named)
        begins.append(used[start])
        return found

    with (
        one_thread(),
        mock.patch.object(Arena, "_fill_next", noted),
        mock.patch.object(OddTransferCount, "__call__", step),
    ):
        said = generate(engine, make_requests()[:1])
    return [a == addresses[0] for a in addresses], begins, [c.tokens for (c,) in said]


def test_every_step_begins_with_the_first_buffer(tmp_path: Path) -> None:
    with one_thread():
        model = model_in_fp32("gqa", ProcessGroupCollection.single())
        wanted = [c.tokens for (c,) in generate(engine_of(model), make_requests()[:1])]
    for next_is_first, begins, said in run_ranks(first_buffers, 2, str(tmp_path)):
        assert next_is_first == [True, False, True]
        assert len(begins) >= 4
        assert all(begins)
        assert said == wanted


def requires(rank: int, world: int, folder: str, what: dict) -> str:
    _, group = group_of(rank, world)
    memory = Files(Path(folder), rank, **what)
    multicast_by_peers(memory)
    try:
        comm = SequenceParallelComm.create(group, memory, max_bytes=64, mode="require")
    except ValueError as error:
        return str(error)
    return comm.way


def test_require_takes_multicast_or_stops_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "with").mkdir()
    there = run_ranks(requires, 2, str(tmp_path / "with"), {"multicast": {}})
    assert there == ["multimem", "multimem"]
    said = run_ranks(requires, 2, str(tmp_path), {"multicast": {1: "no switch"}})
    assert said[0] == said[1]
    assert "--nvls require: the collectives would go through p2p (rank 1: no switch)" in said[0]


def decodes(rank: int, world: int, folder: str, families: dict[str, dict]) -> dict[str, tuple]:
    """Return of each family what the optimized forward says over this memory, and the ways."""
    groups, group = group_of(rank, world)
    found = {}
    for family, how in families.items():
        model = model_in_fp32(family, groups, sequence_parallel=True)
        (Path(folder) / family).mkdir(exist_ok=True)
        memory = Files(Path(folder) / family, rank, **how.get("memory", {}))
        multicast_by_peers(memory)
        comm = SequenceParallelComm.create(group, memory, max_bytes=how.get("max_bytes", 1 << 16))
        engine = engine_of(model, max_num_batched_tokens=500, token_multiple=world)
        engine.model = InferenceOptimizedModel(model, comm)
        with one_thread(), trace(groups) as records, copies_into_arenas() as copied:
            said = generate(engine, make_requests())
        ways = Counter((record.kind, record.how) for record in records)
        ways["copied", comm.way] = copied.count(True)
        found[family] = [outputs[0].tokens for outputs in said], ways, comm.way, engine.stats.steps
    return found


@contextmanager
def copies_into_arenas() -> Iterator[list[bool]]:
    """Note of each reduction whether its addends were copied into symmetric memory."""
    found, filled = [], Arena._fill_next

    def noted(arena: Arena, x: torch.Tensor, how: str) -> SymmetricBuffers:
        found.append(x.data_ptr() != arena.next_addends(x.shape, x.dtype).data_ptr())
        return filled(arena, x, how)

    Arena._fill_next = noted
    try:
        yield found
    finally:
        Arena._fill_next = filled


def make_requests() -> list[Request]:
    """Return three requests of a few tokens: the interpreter is slow."""
    return [replace(request, max_new_tokens=4) for request in requests()[:3]]


def model_in_fp32(family: str, groups: ProcessGroupCollection, **layout: bool) -> GPTModel:
    return GPTModel(CONFIGS[family], groups, dtype=torch.float32, seed=3, **layout)


CONFIGS = FAMILIES | {
    "layer norm": replace(FAMILIES["gqa"], norm=NormConfig(kind="LayerNorm")),
    "zero centred": replace(FAMILIES["gqa"], norm=NormConfig(zero_centered=True)),
}
#: Of each family what its memory is like, and the way that is taken.
WAYS = {
    "gqa": ({}, "p2p"),
    "zero centred": ({"memory": {"multicast": {}}}, "multimem"),
    "hybrid": ({}, "p2p"),
    "experts": ({}, "p2p"),
    "layer norm": ({}, "p2p"),
    "window and sinks": ({"max_bytes": 500}, "p2p"),
    "latent": ({"memory": {"problems": {0: "none"}}}, "torch.distributed"),
}


def test_the_optimized_forward_says_the_same_over_every_way(tmp_path: Path) -> None:
    hows = {family: how for family, (how, _) in WAYS.items()}
    found = run_ranks(decodes, 2, str(tmp_path), hows, timeout=240)
    for family, (how, way) in WAYS.items():
        model = model_in_fp32(family, ProcessGroupCollection.single())
        with one_thread():
            wanted = [
                outputs[0].tokens
                for outputs in generate(
                    engine_of(model, max_num_batched_tokens=500), make_requests()
                )
            ]
        for rank in found:
            said, ways, taken, steps = rank[family]
            assert (said, taken) == (wanted, way), family
            fused = ways["reduce_scatter", f"{way} fused"]
            assert ways["all_gather", f"{way} fused"] == fused
            if family in ("gqa", "zero centred"):
                # The embedding's and, before the first block, a gather; logits may not be packs.
                assert fused == 4 * steps
                assert ways["reduce_scatter", way] == ways["all_gather", way] == steps
                assert ways["copied", way] == steps  # the embedding's; products write there
            elif family == "layer norm":
                assert (fused, ways["reduce_scatter", way]) == (0, 5 * steps)
                assert ways["copied", way] == steps
            elif "max_bytes" in how:  # the prompts' step is wider, those of single tokens are not
                assert 0 < fused < 4 * steps
                assert ways["reduce_scatter", "sum"] > 0
            elif way == "torch.distributed":
                assert not any(taken.startswith("p2p") for _, taken in ways)
            else:
                assert fused >= steps
            # Of its block of experts each step that only decodes, of an odd number of tokens.
            experts = steps - 1 if family == "experts" else 0
            assert ways["all_gather", f"{way} v"] == experts
            assert ways["reduce_scatter", f"{way} v"] == experts


def waits_in_vain(rank: int, world: int, folder: str) -> tuple[int, str]:
    _, group = group_of(rank, world)
    memory = Files(Path(folder), rank)
    half = memory.exchange(memory.allocate(1024, 512), group)
    arena = Arena(group, (half, half), "p2p", tries=50)
    if rank == 0:
        arena.reduce_scatter(torch.ones(world * 4, 4))
    try:
        arena.check()
    except RuntimeError as error:
        return int(arena.status), str(error)
    return int(arena.status), ""


def test_a_peer_that_never_comes_is_named(tmp_path: Path) -> None:
    (late, said), other = run_ranks(waits_in_vain, 2, str(tmp_path))
    assert (late, other) == (2, (0, ""))
    assert "rank 1 did not reach a collective of p2p within 50 polls" in said


def limited(rank: int, world: int, folder: str) -> tuple[str, list[str]]:
    """Return what a step of a run with a limit says of a rank that leaves, and what was logged."""
    groups, group = group_of(rank, world)
    model, lines = model_in_fp32("gqa", groups, sequence_parallel=True), []
    memory = Files(Path(folder), rank)
    comm = SequenceParallelComm.create(group, memory, max_bytes=500, limit=200)
    engine = engine_of(model, max_num_batched_tokens=500, token_multiple=world)
    engine.model = InferenceOptimizedModel(model, comm)
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("megatron.core.comm.symmetric_memory").addHandler(handler)
    for request in make_requests():
        engine.add(request)
    with one_thread():
        engine.step()  # the prompts', which is wider than the memory
        if rank == 1:
            return "", lines
        try:
            engine.step()
        except RuntimeError as error:
            return str(error), lines
    return "", lines


def test_spin_limit_names_missing_peer_and_oversized_message(tmp_path: Path) -> None:
    (said, lines), (_, quiet) = run_ranks(limited, 2, str(tmp_path))
    assert "rank 1 did not reach a collective of p2p within 200 polls" in said
    assert len(lines) == 1
    assert "over the 512 of the symmetric memory" in lines[0]
    assert not quiet


def strided(rank: int, world: int, folder: str) -> bool:
    _, group = group_of(rank, world)
    comm = SequenceParallelComm.create(group, Files(Path(folder), rank), max_bytes=1 << 16)
    whole = addends(world, (world * 4, 32), 3)
    columns = whole.transpose(1, 2).contiguous().transpose(1, 2)[rank]
    own = comm.reduce_scatter(columns)
    shifted = torch.empty(own.numel() + 1)[1:].view(own.shape).copy_(own)  # 4 bytes off
    halves = own.t().contiguous().t()
    total = whole.sum(0)
    return all(torch.equal(comm.all_gather(x), total) for x in (own, shifted, halves))


def test_strided_and_misaligned_inputs_are_right(tmp_path: Path) -> None:
    assert run_ranks(strided, 2, str(tmp_path)) == [True, True]


@pytest.mark.parametrize("world", [2, 18, 19, 72])
def test_programs_fit_the_signal_pad(world: int) -> None:
    half = SymmetricBuffers(
        torch.zeros(16, dtype=torch.uint8), torch.zeros(world), torch.zeros(world), 9216, 0
    )
    group = Group("tp", tuple(range(world)), 0, handle=object())
    arena = Arena(group, (half, half), "p2p")
    assert arena.programs * world * 4 <= 9216
    assert arena.programs >= 1
