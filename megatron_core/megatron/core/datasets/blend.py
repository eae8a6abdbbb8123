# SPDX-License-Identifier: Apache-2.0
"""One stream of samples drawn from several data sets in given proportions."""

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from megatron.core.datasets.chat_dataset import ChatDataset
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.index_cache import IndexCache, digest_of
from megatron.core.datasets.token_rows import TokenRows

_STEPS_AT_ONCE = 1 << 16


def _greedy(weights: Sequence[float], limits: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Yield (data set, sample number in it) for ever, or until every limit is reached.

    A plain loop: each choice depends on all before it, and rounding decides the ties.
    """
    drawn = [0] * len(weights)
    live = [(i, weight) for i, weight in enumerate(weights) if limits[i] > 0]
    step = 0
    while live:
        scale = step or 1
        largest, chosen = -np.inf, 0
        for i, weight in live:
            behind = weight * scale - drawn[i]
            if behind > largest:  # strictly: ties go to the lowest number
                largest, chosen = behind, i
        yield chosen, drawn[chosen]
        drawn[chosen] += 1
        step += 1
        if drawn[chosen] >= limits[chosen]:
            live = [(i, weight) for i, weight in live if i != chosen]


def _collect(draws: Iterator[tuple[int, int]], size: int) -> dict[str, np.ndarray]:
    dataset_index = np.empty(size, dtype=np.int16)
    sample_index = np.empty(size, dtype=np.int64)
    for start in range(0, size, _STEPS_AT_ONCE):
        block = list(islice(draws, min(_STEPS_AT_ONCE, size - start)))
        columns = np.array(block, dtype=np.int64)
        dataset_index[start : start + len(block)] = columns[:, 0]
        sample_index[start : start + len(block)] = columns[:, 1]
    return {"dataset_index": dataset_index, "dataset_sample_index": sample_index}


def blend_by_weight(weights: Sequence[float], size: int) -> dict[str, np.ndarray]:
    """Choose a data set for every step so that each prefix keeps the proportions.

    At step n the data set furthest behind is drawn: argmax_i(w_i * max(n, 1) - drawn_i), ties to
    the lowest i. No data set is ever ahead of its share by a whole sample.

    Args:
        weights: one per data set, summing to 1.
        size: steps.

    Returns:
        `dataset_index` int16 [size] and `dataset_sample_index` int64 [size].
    """
    return _collect(_greedy(weights, [np.inf] * len(weights)), size)


def blend_everything(sizes: Sequence[int]) -> dict[str, np.ndarray]:
    """Draw every sample of every data set once, in proportion to their sizes.

    Args:
        sizes: samples of each data set.

    Returns:
        As `blend_by_weight`, with sum(sizes) steps.
    """
    total = sum(sizes)
    return _collect(_greedy([size / total for size in sizes], sizes), total)


def check_weights(weights: Sequence[float]) -> list[float]:
    """Normalise blend weights.

    Args:
        weights: one per data set, in any unit.

    Returns:
        Weights summing to 1.

    Raises:
        ValueError: a weight is negative or not a number, or all are zero.
    """
    total = sum(weights)
    if not all(0 <= weight < np.inf for weight in weights) or not total > 0:
        raise ValueError(
            f"blend weights {list(weights)}: each must be a number of 0 or more, one above 0"
        )
    return [weight / total for weight in weights]


class BlendedDataset:
    """Several data sets of one kind read as one.

    Args:
        datasets: parts, of one sequence length; at most 32767.
        weights: proportions; None draws every sample of every part once.
        num_samples: steps; must be None without weights.
        name: of the split, for cache files and messages.

    Raises:
        ValueError: the weights are impossible, or a part holds too few samples for its share.
    """

    def __init__(
        self,
        datasets: Sequence[GPTDataset] | Sequence[ChatDataset],
        *,
        weights: Sequence[float] | None = None,
        num_samples: int | None = None,
        name: str = "train",
    ) -> None:
        if (weights is None) != (num_samples is None):
            raise ValueError("a blend needs weights and num_samples, or neither of them")
        if weights is not None and len(weights) != len(datasets):
            raise ValueError(f"{len(weights)} blend weights for {len(datasets)} data sets")
        self.datasets = list(datasets)
        self.config = self.datasets[0].config
        self.name = name
        self._weights = None if weights is None else check_weights(weights)
        self._num_samples = num_samples
        arrays = IndexCache(self.config.cache_dir).load_or_build(
            f"BlendedDataset-{name}",
            self.description,
            self._build,
            names=("dataset_index", "dataset_sample_index"),
        )
        self.dataset_index = arrays["dataset_index"]
        self.dataset_sample_index = arrays["dataset_sample_index"]
        drawn = np.bincount(self.dataset_index, minlength=len(self.datasets)).tolist()
        for part, count in zip(self.datasets, drawn, strict=True):
            if count > len(part):
                raise ValueError(
                    f"the {name} blend draws {count} samples of {part.source.prefix}, which gives "
                    f"{len(part)}; build it with more samples"
                )

    @property
    def description(self) -> dict[str, object]:
        """Everything the order and content of the samples depend on, as JSON values."""
        return {
            "class": "BlendedDataset",
            "parts": [part.description for part in self.datasets],
            "weights": self._weights,
            "num_samples": self._num_samples,
        }

    @property
    def fingerprint(self) -> str:
        """Name of the sequence of samples: equal fingerprints, equal training data."""
        return digest_of(self.description)

    def _build(self) -> dict[str, np.ndarray]:
        if self._weights is None:
            return blend_everything([len(part) for part in self.datasets])
        return blend_by_weight(self._weights, self._num_samples)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.dataset_index)

    def batch(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Read several samples; see `GPTDataset.batch`.

        Args:
            indices: sample numbers, 0 <= index < len(self), [b].

        Returns:
            int64 [b, s + 1].

        Raises:
            IndexError, ValueError: see `read`.
        """
        return self.read(indices).tokens

    def read(self, indices: Sequence[int] | np.ndarray) -> TokenRows:
        """Read several samples with all that training needs of them.

        Args:
            indices: sample numbers, 0 <= index < len(self), [b].

        Raises:
            IndexError: there is no such sample.
            ValueError: a token id is outside the vocabulary.
        """
        indices = np.asarray(indices, dtype=np.int64)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(
                f"samples {indices.min()} to {indices.max()} of the {self.name} blend, which has "
                f"{len(self)}"
            )
        parts, samples = self.dataset_index[indices], self.dataset_sample_index[indices]
        pieces = []
        for part in np.unique(parts).tolist():
            places = np.flatnonzero(parts == part)
            pieces.append((places, self.datasets[part].read(samples[places])))
        return TokenRows.merge(len(indices), pieces)
