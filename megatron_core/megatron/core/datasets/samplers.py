# SPDX-License-Identifier: Apache-2.0
"""Microbatches of each data-parallel rank, as a function of the number of consumed samples.

All ranks together consume samples 0, 1, 2, ... of one order. A step consumes the next g samples,
where g is given by `BatchSizes`, and `Division` assigns them to ranks and microbatches. A step
therefore consumes the same samples, in the same blocks, for any number of ranks, and a run resumes
exactly from the number of consumed samples on any layout.

A microbatch depends only on the number of samples consumed before it. Threads may read microbatches
ahead; they are returned in order, and an error is raised when its microbatch is due.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from megatron.core.datasets.batch_sizes import BatchSizes, Division
from megatron.core.datasets.token_rows import SampleRows, cumulative_lengths


class SampleOrder(Protocol):
    """The order in which the samples of a data set are consumed."""

    @property
    def end(self) -> int | None:
        """Number of samples in the order; None if it is infinite."""

    def indices(self, start: int, stop: int) -> np.ndarray:
        """Return the dataset's sample numbers at positions [start, stop) of the order."""
        ...


@dataclass(frozen=True)
class SingleOrder:
    """Every sample once, in the order of the dataset.

    Args:
        num_samples: number of samples of the dataset.
    """

    num_samples: int

    @property
    def end(self) -> int:
        """Return the number of samples."""
        return self.num_samples

    def indices(self, start: int, stop: int) -> np.ndarray:
        """Return [start, stop) itself, int64 [stop - start]."""
        return np.arange(start, stop, dtype=np.int64)


class CyclicOrder:
    """Infinitely many epochs, each with its own permutation.

    A batch may span two epochs: dropping the remainder of an epoch would make the order depend on
    the batch size.

    Args:
        num_samples: number of samples of the dataset.
        seed: epoch e is shuffled with the seed (seed, e).
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        self._num_samples = num_samples
        self._seed = seed
        self._cached: tuple[int, np.ndarray] | None = None  # (epoch, permutation) of the last call

    @property
    def end(self) -> None:
        """Return None: there is no end."""
        return None

    def _permutation(self, epoch: int) -> np.ndarray:
        cached = self._cached  # read once: threads that read ahead may be in different epochs
        if cached is None or cached[0] != epoch:
            random = np.random.RandomState([self._seed, epoch])
            self._cached = cached = (epoch, random.permutation(self._num_samples))
        return cached[1]

    def indices(self, start: int, stop: int) -> np.ndarray:
        """Return sample numbers, int64 [stop - start]."""
        numbers_by_epoch = [np.empty(0, dtype=np.int64)]
        for epoch in range(start // self._num_samples, -(-stop // self._num_samples)):
            epoch_start = epoch * self._num_samples
            numbers_by_epoch.append(
                self._permutation(epoch)[max(start - epoch_start, 0) : stop - epoch_start]
            )
        return np.concatenate(numbers_by_epoch)


@runtime_checkable
class TokenSource(Protocol):
    """A dataset that `GPTBatches` can read, such as `GPTDataset` or a user's own class."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def read(self, indices: np.ndarray) -> SampleRows:
        """Return samples [b]."""
        ...


@dataclass(frozen=True, kw_only=True)
class GPTBatch:
    """One microbatch of one data-parallel rank, on the host.

    Args:
        tokens: int64 [b, s + 1], inputs and labels.
        loss_mask: float32 [b, s].
        sample_ids: int64 [b], positions in the order of consumption, which seed dropout.
        positions: int64 [b, s], or None for 0 .. s - 1.
        document_ids: int32 [b, s], or None for one document a row; see `SampleRows`.
        padding: bool [b, s], all True in a padding microbatch; None if no rank has padding, see
            `SampleRows`.
        is_padding: whether this is a padding microbatch: its rows repeat a sample of another
            microbatch of the step, and its loss mask is zero.
    """

    tokens: torch.Tensor
    loss_mask: torch.Tensor
    sample_ids: torch.Tensor
    positions: torch.Tensor | None = None
    document_ids: torch.Tensor | None = None
    padding: torch.Tensor | None = None
    is_padding: bool = False

    @property
    def num_samples(self) -> int:
        """Return the number of samples of the step in this microbatch."""
        return 0 if self.is_padding else len(self.tokens)

    @property
    def input_ids(self) -> torch.Tensor:
        """Return a view, int64 [b, s]."""
        return self.tokens[:, :-1]

    @property
    def labels(self) -> torch.Tensor:
        """Return a view, int64 [b, s]."""
        return self.tokens[:, 1:]

    @property
    def cu_seqlens(self) -> torch.Tensor | None:
        """Return the document boundaries, int32 [b, d + 1]; see `cumulative_lengths`."""
        if self.document_ids is None:
            return None
        return torch.from_numpy(cumulative_lengths(self.document_ids.numpy()))


@dataclass(frozen=True, kw_only=True)
class SampleRange:
    """The samples of a microbatch.

    Args:
        samples: positions in the order of consumption; for a padding microbatch, the empty range
            at the end of its step.
        rows: number of rows of the microbatch, padding or not.
        marks_padding: whether any rank has a padding microbatch in the same round. All ranks then
            return a padding mask, since experts may gather tokens from every rank.
    """

    samples: range
    rows: int
    marks_padding: bool


class GPTBatches(Iterator[GPTBatch]):
    """Microbatches of one data-parallel rank. The number of consumed samples is the only state.

    Args:
        dataset: source of the samples.
        micro_batch_size: b.
        data_parallel_rank: index of this data-parallel rank. The tensor, context and pipeline ranks
            of one data-parallel rank pass the same index and read the same batch.
        data_parallel_size: number of data-parallel ranks.
        consumed_samples: number of samples that all data-parallel ranks consumed before this run; a
            step begins there.
        order: sample order; None means every sample once (`SingleOrder`), without the last samples
            if they do not fill one microbatch per data-parallel rank.
        batch_sizes: global batch size g of each step; None means b times the data-parallel size.

    Raises:
        ValueError: an impossible number, more consumed samples than the data has, or a data set
            without `read`.
    """

    def __init__(
        self,
        dataset: TokenSource,
        *,
        micro_batch_size: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        consumed_samples: int = 0,
        order: SampleOrder | None = None,
        batch_sizes: BatchSizes | None = None,
    ) -> None:
        if not isinstance(dataset, TokenSource):
            raise ValueError(
                f"a data set of type {type(dataset).__name__} needs __len__() and "
                "read(indices) -> SampleRows(tokens=int64 [b, s + 1], loss_mask=float32 [b, s]): "
                "see megatron.core.datasets.token_rows"
            )
        self._dataset = dataset
        self._order = SingleOrder(len(dataset)) if order is None else order
        self._sizes = batch_sizes or BatchSizes.constant(micro_batch_size * data_parallel_size)
        self._divisions = {
            size: Division(
                samples=size,
                micro_batch_size=micro_batch_size,
                data_parallel_size=data_parallel_size,
            )
            for size in self._sizes.sizes
        }
        self._data_parallel_rank = data_parallel_rank
        if consumed_samples < 0:
            raise ValueError(f"{consumed_samples} samples consumed: impossible")
        # The first sample of the current step, and the number of its microbatches consumed so far.
        self._begin, self._microbatches_done = consumed_samples, 0
        self.sample_range()  # checks the data-parallel rank
        if self._order.end is not None and consumed_samples > self._order.end:
            raise ValueError(
                f"{consumed_samples} samples are consumed already but the data has only "
                f"{self._order.end}; resume with the data the run was started with"
            )

    @property
    def consumed_samples(self) -> int:
        """Number of samples that all data-parallel ranks have consumed; checkpoints store it."""
        division, begin, number = self._microbatch(0)
        return begin + division.consumed(number)

    def _microbatch(self, ahead: int) -> tuple[Division, int, int]:
        """Return the step's division, its first sample, and the round of the microbatch `ahead`
        positions after the next one."""
        begin, number = self._begin, self._microbatches_done + ahead
        while number >= (division := self._divisions[self._sizes.at(begin)]).rounds:
            begin, number = begin + division.samples, number - division.rounds
        return division, begin, number

    def sample_range(self, ahead: int = 0) -> SampleRange:
        """Return the samples of the microbatch `ahead` positions after the next one."""
        division, begin, number = self._microbatch(ahead)
        local = division.sample_range(self._data_parallel_rank, number)
        samples = range(begin + local.start, begin + local.stop)
        return SampleRange(
            samples=samples,
            rows=len(samples) or division.largest(number),
            marks_padding=not division.sample_range(division.data_parallel_size - 1, number),
        )

    def has(self, ahead: int = 0) -> bool:
        """Return whether the microbatch `ahead` positions after the next one exists."""
        division, begin, number = self._microbatch(ahead)
        end = self._order.end
        return end is None or begin + division.consumed(number + 1) <= end

    def read(self, sample_range: SampleRange) -> GPTBatch:
        """Read a microbatch. Thread-safe.

        Raises:
            ValueError: the data set returned malformed rows.
        """
        samples = sample_range.samples
        is_padding = not samples
        if is_padding:  # repeat the step's last sample: its values cause no new overflow
            samples = range(samples.start - 1, samples.stop)
        numbers = self._order.indices(samples.start, samples.stop)
        ids = torch.arange(samples.start, samples.stop)
        if is_padding:
            numbers, ids = numbers.repeat(sample_range.rows), ids.repeat(sample_range.rows)
        sample_rows = self._dataset.read(numbers)
        _check_rows(self._dataset, sample_rows, len(numbers))
        rows: dict[str, Any] = {
            field: None if values is None else torch.from_numpy(values)
            for field, values in vars(sample_rows).items()
        }
        loss_mask, padding = rows["loss_mask"], rows["padding"]
        if is_padding:
            rows["loss_mask"] = torch.zeros_like(loss_mask)
            rows["padding"] = torch.ones_like(loss_mask, dtype=torch.bool)
        elif padding is None and sample_range.marks_padding:
            rows["padding"] = torch.zeros_like(loss_mask, dtype=torch.bool)
        return GPTBatch(**rows, sample_ids=ids, is_padding=is_padding)

    def skip(self) -> None:
        """Advance to the next microbatch."""
        _, self._begin, self._microbatches_done = self._microbatch(1)

    def __next__(self) -> GPTBatch:
        """Return the next microbatch.

        Raises:
            StopIteration: on all ranks, when the remaining samples do not fill one round.
        """
        if not self.has():
            raise StopIteration
        batch = self.read(self.sample_range())
        self.skip()
        return batch


def _check_rows(dataset: TokenSource, rows: SampleRows, count: int) -> None:
    """Check that a data set returned rows as `SampleRows` describes them.

    Args:
        count: b.

    Raises:
        ValueError: another type, dtype or shape.
    """
    name = f"{type(dataset).__name__}.read()"
    if not isinstance(rows, SampleRows):
        raise ValueError(
            f"{name} returned {type(rows).__name__}: return SampleRows(tokens=int64 [b, s + 1], "
            "loss_mask=float32 [b, s]) of megatron.core.datasets.token_rows"
        )
    for field, values in vars(rows).items():
        absent = values is None and field not in ("tokens", "loss_mask")
        if not (absent or isinstance(values, np.ndarray)):
            raise ValueError(
                f"{name} returned {field} of type {type(values).__name__}: return a numpy array"
            )
    shape = (count, rows.tokens.shape[1] - 1) if rows.tokens.ndim == 2 else (count, 0)
    if shape[1] < 1 or len(rows.tokens) != count or rows.tokens.dtype != np.int64:
        raise ValueError(
            f"{name} returned tokens {rows.tokens.dtype} {list(rows.tokens.shape)}: return int64 "
            f"[{count}, s + 1], inputs and labels in one"
        )
    if rows.loss_mask.shape != shape or rows.loss_mask.dtype != np.float32:
        raise ValueError(
            f"{name} returned loss_mask {rows.loss_mask.dtype} {list(rows.loss_mask.shape)} for "
            f"tokens {list(rows.tokens.shape)}: return float32 {list(shape)}, one for each label"
        )
    for field, dtype in (
        ("positions", np.int64),
        ("document_ids", np.int32),
        ("padding", np.bool_),
    ):
        values = vars(rows)[field]
        if values is not None and (values.shape != shape or values.dtype != dtype):
            raise ValueError(
                f"{name} returned {field} {values.dtype} {list(values.shape)} for tokens "
                f"{list(rows.tokens.shape)}: return {np.dtype(dtype)} {list(shape)}, one for each "
                "input"
            )
    if rows.document_ids is not None and count:
        steps = np.diff(rows.document_ids, axis=1)
        if rows.document_ids[:, 0].any() or not np.isin(steps, (0, 1)).all():
            raise ValueError(
                f"{name} returned document_ids that do not count 0, 1, ... along a row: number the "
                "documents of a row in their order"
            )
    if rows.padding is not None and rows.loss_mask[rows.padding].any():
        raise ValueError(f"{name} returned padding with a loss: loss_mask must be 0 there")


# Microbatches read ahead per thread: one in progress, and one that is ready.
_AHEAD = 2


class PrefetchedBatches(Iterator[GPTBatch]):
    """The microbatches of `batches`, read ahead by threads.

    Args:
        batches: source of the microbatches; it advances with each returned microbatch.
        workers: number of threads.

    Raises:
        ValueError: `workers` is below 1.
    """

    def __init__(self, batches: GPTBatches, *, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"{workers} workers: must be 1 or more")
        self._batches, self._ahead = batches, _AHEAD * workers
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="batches")
        self._reading: deque[Future[GPTBatch]] = deque()

    @property
    def consumed_samples(self) -> int:
        """Number of samples that all data-parallel ranks consumed, without samples read ahead."""
        return self._batches.consumed_samples

    def __next__(self) -> GPTBatch:
        """Return the next microbatch.

        Raises:
            StopIteration: see `GPTBatches`.
        """
        while len(self._reading) < self._ahead and self._batches.has(len(self._reading)):
            sample_range = self._batches.sample_range(len(self._reading))
            self._reading.append(self._pool.submit(self._batches.read, sample_range))
        if not self._reading:
            raise StopIteration
        batch = self._reading.popleft().result()
        self._batches.skip()
        return batch

    def close(self) -> None:
        """Stop reading ahead, without waiting for reads in progress."""
        self._reading.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)
