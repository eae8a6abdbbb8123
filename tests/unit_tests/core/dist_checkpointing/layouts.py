# SPDX-License-Identifier: Apache-2.0
"""Random layouts of logical tensors over simulated ranks, and ranks that are threads."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.boxes import Box
from megatron.core.dist_checkpointing import (
    Coordinator,
    Solo,
    StoreCoordinator,
    TensorChunk,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
)

Tensors = Mapping[str, torch.Tensor]


def chunk_of(
    name: str,
    shape: Sequence[int],
    offsets: Sequence[int],
    tensor: torch.Tensor,
    ranks: tuple[int, ...] = (0,),
    **options: Any,
) -> TensorChunk:
    """Return a box of a logical tensor, held by `ranks`."""
    return TensorChunk(
        name=name,
        shape=tuple(shape),
        offsets=tuple(offsets),
        tensor=tensor,
        replica_ranks=ranks,
        **options,
    )


def full_chunks(tensors: Tensors, ranks: tuple[int, ...] = (0,)) -> list[TensorChunk]:
    """Return every tensor as one chunk held by `ranks`."""
    return [chunk_of(n, t.shape, (0,) * t.ndim, t, ranks) for n, t in tensors.items()]


def empty_like(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Return tensors of the same shapes and dtypes whose bytes are all 0xA5."""
    return {name: poison(tuple(t.shape), t.dtype) for name, t in tensors.items()}


def poison(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor that equals no test value, so that an unwritten element shows."""
    if dtype == torch.bool:
        return torch.ones(sizes, dtype=dtype)
    count = torch.Size(sizes).numel() * dtype.itemsize
    return torch.full((count,), 0xA5, dtype=torch.uint8).view(dtype).view(sizes)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal bit by bit, NaN and negative zero included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    # clone: a tensor of one element is contiguous whatever its strides
    raw = (t.clone(memory_format=torch.contiguous_format).reshape(-1) for t in (a, b))
    raw = (t.as_strided((t.numel(),), (1,)).view(torch.uint8) for t in raw)
    return torch.equal(*raw)


def random_boxes(shape: tuple[int, ...], rng: random.Random, depth: int = 3) -> list[Box]:
    """Split a tensor into boxes by random planes, each through a random box."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(rng.randrange(depth + 1) if shape else 0):
        box = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.randrange(len(shape))
        cut = rng.randrange(box.sizes[dim] + 1)  # the ends too: empty boxes must be harmless
        for begin, size in ((0, cut), (cut, box.sizes[dim] - cut)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim] += begin
            sizes[dim] = size
            boxes.append(Box(tuple(offsets), tuple(sizes)))
    return boxes


def with_strides(values: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """Return a tensor of the same values, contiguous, transposed or with gaps."""
    layout = rng.randrange(3)
    if layout == 1 and values.ndim >= 2:  # transposed memory
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == 2 and values.ndim >= 1:  # every second column of a wider buffer
        padded = poison((*values.shape[:-1], 2 * values.shape[-1] + 1), values.dtype)
        padded[..., 1::2] = values
        return padded[..., 1::2]
    return values.contiguous()


def random_layout(
    tensors: Tensors, world: int, rng: random.Random, *, fill: bool
) -> list[list[TensorChunk]]:
    """Deal random boxes of every tensor to ranks, some boxes to several ranks.

    Args:
        tensors: the logical tensors.
        world: number of ranks.
        rng: source of all random choices.
        fill: whether chunks hold the values (to save) or poison (to load).
    """
    ranks: list[list[TensorChunk]] = [[] for _ in range(world)]
    for name, tensor in tensors.items():
        for box in random_boxes(tuple(tensor.shape), rng):
            holders = tuple(sorted(rng.sample(range(world), rng.randint(1, world))))
            for rank in holders:
                values = tensor[box.slices] if fill else poison(box.sizes, tensor.dtype)
                strided = with_strides(values, rng)
                ranks[rank].append(chunk_of(name, tensor.shape, box.offsets, strided, holders))
    for chunks in ranks:
        rng.shuffle(chunks)  # members of a replica set need not list their chunks in one order
    return ranks


def on_threads(
    world: int, job: Callable[[int, Coordinator], Any], *, timeout_seconds: float = 20.0
) -> list[Any]:
    """Run `job(rank, coordinator)` on `world` threads; return each rank's value or error."""
    if world == 1:
        return [_value_or_error(job, 0, Solo())]
    store = dist.HashStore()
    outcomes: list[Any] = [None] * world

    def run(rank: int) -> None:
        coordinator = StoreCoordinator(store, rank, world, timeout_seconds=timeout_seconds)
        outcomes[rank] = _value_or_error(job, rank, coordinator)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def _value_or_error(
    job: Callable[[int, Coordinator], Any], rank: int, coordinator: Coordinator
) -> Any:
    try:
        return job(rank, coordinator)
    except Exception as error:
        return error


def raise_errors(outcomes: list[Any]) -> list[Any]:
    """Return what `on_threads` returned, or raise its first error."""
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


#: Returns the expected values of a chunk.
Values = Callable[[TensorChunk], torch.Tensor]


def fill(chunks: Sequence[TensorChunk], values: Values) -> None:
    """Give every chunk its expected values."""
    for chunk in chunks:
        chunk.tensor.copy_(values(chunk))


def load_and_compare(
    chunks: Sequence[TensorChunk], folder: Path, coordinator: Coordinator, values: Values
) -> int:
    """Load into poisoned memory; return the number of elements compared."""
    fill(chunks, lambda chunk: poison(tuple(chunk.tensor.shape), chunk.tensor.dtype))
    load_checkpoint(folder, chunks, coordinator=coordinator)
    for chunk in chunks:
        assert same_bits(chunk.tensor.contiguous(), values(chunk)), chunk
    return sum(chunk.tensor.numel() for chunk in chunks)


def save_and_load_layouts(
    root: str,
    layouts: Sequence[Sequence[TensorChunk]],
    coordinator: Coordinator,
    values: Values,
    *,
    distances: tuple[int, ...] = (1,),
) -> None:
    """Save this rank's chunks of every layout as one checkpoint each, and load them on the layouts
    `distances` further."""
    for index, chunks in enumerate(layouts):
        fill(chunks, values)
        save_checkpoint(root, index, chunks, {}, coordinator=coordinator)
    for index, chunks in enumerate(layouts):
        for distance in distances:
            folder = Path(root, f"iter_{(index - distance) % len(layouts):07d}")
            assert load_and_compare(chunks, folder, coordinator, values) > 0


def check_single_process_loads(
    root: Path, layouts: int, single: Sequence[TensorChunk], values: Values
) -> None:
    """Assert that the checkpoints of all layouts hold every element of the tensors of `single`
    once, and load on one process."""
    numel = sum(chunk.tensor.numel() for chunk in single)
    for index in range(layouts):
        folder = root / f"iter_{index:07d}"
        assert load_and_compare(single, folder, Solo(), values) == numel
        tensors = read_manifest(folder).tensors
        assert tensors.keys() == {chunk.name for chunk in single}
        assert sum(chunk.box.numel for t in tensors.values() for chunk in t.chunks) == numel
