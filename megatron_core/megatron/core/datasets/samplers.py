# SPDX-License-Identifier: Apache-2.0
"""Which sample goes to which lane at which step: a function of the samples consumed so far.

All lanes together consume the samples 0, 1, 2, ... of one order. A microbatch takes the next
b * lanes of them, lane r the slice [r * b, (r + 1) * b). So a step of g samples consumes the same
set for every number of lanes and every microbatch size, and a run resumes exactly from the number
of samples consumed, on any layout.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from megatron.core.datasets.token_rows import TokenRows, cumulative_lengths


class SampleOrder(Protocol):
    """The order in which the samples of a data set are consumed."""

    @property
    def end(self) -> int | None:
        """How many samples can be consumed; None means without end."""

    def indices(self, start: int, stop: int) -> np.ndarray:
        """Return the data set's sample numbers of the samples [start, stop) consumed."""


@dataclass(frozen=True)
class SingleOrder:
    """Every sample once, as the data set has shuffled them.

    Args:
        num_samples: of the data set.
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
    """Epoch after epoch without end, each in a permutation of its own.

    A batch may lie on the border of two epochs: dropping the rest of an epoch instead would make
    the order depend on the batch size.

    Args:
        num_samples: of the data set.
        seed: the permutation of epoch e is drawn from (seed, e).
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        self._num_samples = num_samples
        self._seed = seed
        self._drawn: tuple[int, np.ndarray] | None = None  # the epoch last asked for

    @property
    def end(self) -> None:
        """Return None: there is no end."""
        return None

    def _permutation(self, epoch: int) -> np.ndarray:
        drawn = self._drawn  # read once: threads that read ahead may be in different epochs
        if drawn is None or drawn[0] != epoch:
            random = np.random.RandomState([self._seed, epoch])
            self._drawn = drawn = (epoch, random.permutation(self._num_samples))
        return drawn[1]

    def indices(self, start: int, stop: int) -> np.ndarray:
        """Return sample numbers, int64 [stop - start]."""
        parts = [np.empty(0, dtype=np.int64)]
        for epoch in range(start // self._num_samples, -(-stop // self._num_samples)):
            first = epoch * self._num_samples
            parts.append(self._permutation(epoch)[max(start - first, 0) : stop - first])
        return np.concatenate(parts)


def lane_samples(
    consumed_samples: int, *, micro_batch_size: int, lanes_rank: int, lanes_size: int
) -> range:
    """Say which samples of the order make up a lane's next microbatch.

    Args:
        consumed_samples: by all lanes together so far.
        micro_batch_size: b, samples of one lane.
        lanes_rank: this lane.
        lanes_size: number of lanes.

    Returns:
        Places in the order, [b].
    """
    start = consumed_samples + lanes_rank * micro_batch_size
    if not 0 <= lanes_rank < lanes_size or micro_batch_size < 1 or consumed_samples < 0:
        raise ValueError(
            f"lane {lanes_rank} of {lanes_size}, micro batch size {micro_batch_size}, "
            f"{consumed_samples} samples consumed: impossible"
        )
    return range(start, start + micro_batch_size)


class TokenSource(Protocol):
    """What GPTBatches reads: GPTDataset, BlendedDataset, ChatDataset and MockDataset are four."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def read(self, indices: np.ndarray) -> TokenRows:
        """Return samples [b]."""


@dataclass(frozen=True, kw_only=True)
class GPTBatch:
    """One microbatch of one lane, on the host.

    Args:
        tokens: int64 [b, s + 1], inputs and labels in one.
        loss_mask: float32 [b, s].
        sample_ids: int64 [b], places in the order of consumption: what dropout is a function of.
        positions: int64 [b, s], or None for 0 .. s - 1.
        document_ids: int32 [b, s], or None for one document a row; see `TokenRows`.
    """

    tokens: torch.Tensor
    loss_mask: torch.Tensor
    sample_ids: torch.Tensor
    positions: torch.Tensor | None = None
    document_ids: torch.Tensor | None = None

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
        """Return where documents start, int32 [b, d + 1]; see `cumulative_lengths`."""
        if self.document_ids is None:
            return None
        return torch.from_numpy(cumulative_lengths(self.document_ids.numpy()))


class GPTBatches(Iterator[GPTBatch]):
    """Microbatches of one lane; its only state is the number of samples consumed.

    Args:
        dataset: where the samples come from.
        micro_batch_size: b.
        lanes_rank: this lane. Ranks that share a lane (tensor, context, pipeline) give the same
            number and read the same batch.
        lanes_size: number of lanes.
        consumed_samples: by all lanes together before this run.
        order: None means every sample once (`SingleOrder`), without the rest that is less than
            b * lanes.

    Raises:
        ValueError: numbers that cannot be, or more samples consumed than there are.
    """

    def __init__(
        self,
        dataset: TokenSource,
        *,
        micro_batch_size: int,
        lanes_rank: int = 0,
        lanes_size: int = 1,
        consumed_samples: int = 0,
        order: SampleOrder | None = None,
    ) -> None:
        self._dataset = dataset
        self._order = SingleOrder(len(dataset)) if order is None else order
        self._micro_batch_size = micro_batch_size
        self._lanes_rank = lanes_rank
        self._lanes_size = lanes_size
        self._consumed_samples = consumed_samples
        self.places()  # checks the numbers
        if self._order.end is not None and consumed_samples > self._order.end:
            raise ValueError(
                f"{consumed_samples} samples are consumed already but the data has only "
                f"{self._order.end}; resume with the data the run was started with"
            )

    @property
    def consumed_samples(self) -> int:
        """Samples consumed by all lanes together; what a checkpoint keeps."""
        return self._consumed_samples

    def places(self, ahead: int = 0) -> range:
        """Return the places in the order of the microbatch that comes after `ahead` more."""
        return lane_samples(
            self._consumed_samples + ahead * self._stride,
            micro_batch_size=self._micro_batch_size,
            lanes_rank=self._lanes_rank,
            lanes_size=self._lanes_size,
        )

    @property
    def _stride(self) -> int:
        return self._micro_batch_size * self._lanes_size

    def has(self, ahead: int = 0) -> bool:
        """Say whether there is a microbatch after `ahead` more, the same on all lanes."""
        end = self._order.end
        return end is None or self._consumed_samples + (ahead + 1) * self._stride <= end

    def read(self, samples: range) -> GPTBatch:
        """Read the microbatch at some places; any thread may."""
        rows = self._dataset.read(self._order.indices(samples.start, samples.stop))
        return GPTBatch(
            tokens=torch.from_numpy(rows.tokens),
            loss_mask=torch.from_numpy(rows.loss_mask),
            sample_ids=torch.arange(samples.start, samples.stop),
            positions=None if rows.positions is None else torch.from_numpy(rows.positions),
            document_ids=None if rows.document_ids is None else torch.from_numpy(rows.document_ids),
        )

    def skip(self) -> None:
        """Go on to the next microbatch."""
        self._consumed_samples += self._stride

    def __next__(self) -> GPTBatch:
        """Return the next microbatch.

        Raises:
            StopIteration: fewer than b * lanes samples are left, on all lanes alike.
        """
        if not self.has():
            raise StopIteration
        batch = self.read(self.places())
        self.skip()
        return batch
