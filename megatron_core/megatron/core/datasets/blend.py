# SPDX-License-Identifier: Apache-2.0
"""Blended datasets: `--data-path`, `--split`, and sampling in proportion to weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np

from megatron.core.datasets.chat_dataset import ChatDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.index_cache import IndexCache, digest_of
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.token_rows import SampleRows, checked_indices

_STEPS_AT_ONCE = 1 << 16


def _greedy(weights: Sequence[float], limits: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Yield (dataset, its sample number) until every limit is reached; without limits, forever.

    A plain loop, because each choice depends on all earlier ones and rounding decides ties.
    """
    drawn = [0] * len(weights)
    unfinished = [(i, weight) for i, weight in enumerate(weights) if limits[i] > 0]
    step = 0
    while unfinished:
        scale = step or 1
        largest_deficit, chosen = -np.inf, 0
        for i, weight in unfinished:
            deficit = weight * scale - drawn[i]
            if deficit > largest_deficit:  # strictly: ties go to the lowest number
                largest_deficit, chosen = deficit, i
        yield chosen, drawn[chosen]
        drawn[chosen] += 1
        step += 1
        if drawn[chosen] >= limits[chosen]:
            unfinished = [(i, weight) for i, weight in unfinished if i != chosen]


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
    """Choose a dataset for every step so that each prefix keeps the proportions.

    Step n draws from the dataset with the largest deficit: argmax_i(w_i * max(n, 1) - drawn_i),
    ties to the lowest i. No dataset ever exceeds its share by a whole sample.

    Args:
        weights: one per data set, summing to 1.
        size: steps.

    Returns:
        `dataset_index` int16 [size] and `dataset_sample_index` int64 [size].
    """
    return _collect(_greedy(weights, [np.inf] * len(weights)), size)


def blend_everything(sizes: Sequence[int]) -> dict[str, np.ndarray]:
    """Draw every sample of every dataset once, in proportion to their sizes.

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
    """Several datasets of one kind, sampled as one.

    Args:
        datasets: datasets with the same sequence length, at most 32767.
        weights: proportions; None draws every sample of every dataset once.
        num_samples: number of samples; None without weights.
        name: name of the split, for cache files and messages.

    Raises:
        ValueError: the weights are invalid, or a dataset has too few samples for its share.
    """

    def __init__(
        self,
        datasets: Sequence[GPTDataset | ChatDataset],
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
        self._given_weights = weights
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
        for dataset, count in zip(self.datasets, drawn, strict=True):
            if count > len(dataset):
                raise ValueError(
                    f"the {name} blend draws {count} samples of {dataset.source.prefix}, "
                    f"which has {len(dataset)}; build it with more samples"
                )

    @property
    def description(self) -> dict[str, object]:
        """JSON values that determine the order and content of the samples."""
        return {
            "class": "BlendedDataset",
            "parts": [dataset.description for dataset in self.datasets],
            "weights": self._weights,
            "num_samples": self._num_samples,
        }

    @property
    def fingerprint(self) -> str:
        """Digest of `description`: equal fingerprints mean equal training data."""
        return digest_of(self.description)

    def _build(self) -> dict[str, np.ndarray]:
        if self._weights is None or self._num_samples is None:
            return blend_everything([len(dataset) for dataset in self.datasets])
        return blend_by_weight(self._weights, self._num_samples)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.dataset_index)

    def extended(self, num_samples: int) -> BlendedDataset:
        """Return a longer blend whose first samples are all samples of this one.

        Args:
            num_samples: total number of samples.

        Raises:
            ValueError: the blend has no weights.
        """
        if num_samples <= len(self):
            return self
        if self._weights is None:
            raise ValueError(
                f"the {self.name} blend draws each of its {len(self)} samples once: build it "
                "with weights for more samples"
            )
        # No dataset exceeds its share by a whole sample, see `blend_by_weight`.
        datasets = [
            dataset.extended(math.ceil(weight * num_samples) + 1)
            for dataset, weight in zip(self.datasets, self._weights, strict=True)
        ]
        return BlendedDataset(
            datasets, weights=self._given_weights, num_samples=num_samples, name=self.name
        )

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

    def read(self, indices: Sequence[int] | np.ndarray) -> SampleRows:
        """Read several samples with loss mask, positions and document ids.

        Args:
            indices: sample numbers, 0 <= index < len(self), [b].

        Raises:
            IndexError: there is no such sample.
            ValueError: a token id is outside the vocabulary.
        """
        indices = checked_indices(indices, len(self), ("samples", f"{self.name} blend"))
        dataset_numbers, samples = self.dataset_index[indices], self.dataset_sample_index[indices]
        rows_by_dataset = []
        for dataset_number in np.unique(dataset_numbers).tolist():
            row_indices = np.flatnonzero(dataset_numbers == dataset_number)
            rows_by_dataset.append(
                (row_indices, self.datasets[dataset_number].read(samples[row_indices]))
            )
        return SampleRows.merge(len(indices), rows_by_dataset)


# Surplus of samples of each dataset in a blend, because rounding may require one more.
BLEND_SURPLUS = 1.005


@dataclass(frozen=True)
class DataPath:
    """Datasets and their proportions.

    Args:
        prefixes: paths without `.bin` or `.idx`.
        weights: proportions, not normalized; None means by size.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def parse_data_path(words: Sequence[str]) -> DataPath:
    """Parse `--data-path`: `PREFIX...` or `WEIGHT PREFIX WEIGHT PREFIX ...`.

    Args:
        words: the words of the command line.

    Returns:
        Prefixes and weights.

    Raises:
        ValueError: there are no words, or only some of the prefixes have weights.
    """
    numbers = [_number(word) for word in words]
    if not words:
        raise ValueError("data path is empty: give PREFIX, or WEIGHT PREFIX WEIGHT PREFIX ...")
    if all(number is None for number in numbers):
        return DataPath(tuple(words), None)
    prefixes = words[1::2]
    weights = [number for number in numbers[0::2] if number is not None]
    if len(words) != 2 * len(weights) or any(n is not None for n in numbers[1::2]):
        raise ValueError(
            f"data path {' '.join(words)!r}: give PREFIX..., or WEIGHT PREFIX WEIGHT PREFIX ..."
        )
    check_weights(weights)
    return DataPath(tuple(prefixes), tuple(weights))


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def parse_split(text: str) -> tuple[float, float, float]:
    """Parse `--split`: shares of training, validation and test, such as "99,1,0".

    Args:
        text: one to three numbers of any sum, separated by commas; absent ones are 0.

    Returns:
        Three shares that sum to 1.

    Raises:
        ValueError: the text does not have this form.
    """
    words = text.split(",")
    numbers = [_number(word) for word in words]
    shares = [n for n in numbers if n is not None and math.isfinite(n) and n >= 0]
    if not len(shares) == len(words) <= 3 or sum(shares) <= 0:
        raise ValueError(
            f"split {text!r}: give up to three numbers of 0 or more, such as 99,1,0 for training, "
            "validation and test"
        )
    shares += [0.0] * (3 - len(shares))
    train, valid, test = (share / sum(shares) for share in shares)
    return train, valid, test


def split_ranges(num_sequences: int, shares: Sequence[float]) -> list[range]:
    """Split the sequences of a dataset, in file order, by shares.

    Args:
        num_sequences: number of sequences S.
        shares: shares that sum to 1.

    Returns:
        A range of sequence numbers for each share; together they are [0, S).
    """
    bounds = [round(fraction * num_sequences) for fraction in np.cumsum([0.0, *shares]).tolist()]
    bounds[-1] = num_sequences
    return [range(start, stop) for start, stop in pairwise(bounds)]


def has_split(sources: Sequence[IndexedDataset], shares: Sequence[float], which: int) -> bool:
    """Return whether a split contains a sequence of every dataset.

    Args:
        sources: the datasets of a data path.
        shares: shares of the splits, see `parse_split`.
        which: index of the split.
    """
    return all(len(split_ranges(len(source), shares)[which]) for source in sources)


def build_split(
    path: DataPath,
    config: GPTDatasetConfig,
    *,
    name: str = "train",
    shares: Sequence[float] = (1.0, 0.0, 0.0),
    which: int = 0,
    num_samples: int | None = None,
    dataset_type: type[GPTDataset] | type[ChatDataset] = GPTDataset,
    sources: Sequence[IndexedDataset] | None = None,
) -> GPTDataset | ChatDataset | BlendedDataset:
    """Build one split of a data path.

    Datasets without weights are sampled in proportion to the number of samples in one pass over
    each. If one pass yields enough samples, there is only one, as in megatron-core; otherwise
    further passes follow, where megatron-core stops.

    Args:
        path: datasets and proportions.
        config: configuration shared by all samples.
        name: name of the split.
        shares: shares of the splits, see `parse_split`.
        which: index of the split to build.
        num_samples: number of samples; None means one pass over all datasets, without weights.
        dataset_type: class of the datasets.
        sources: the open datasets of `path`, if the caller has them.

    Returns:
        The dataset; a blend for several prefixes.

    Raises:
        ValueError: weights without a number of samples, a share without sequences, or one of the
            errors of `GPTDataset` and `IndexedDataset`.
    """
    if sources is None:
        sources = [IndexedDataset(prefix) for prefix in path.prefixes]
    ranges = [split_ranges(len(source), shares)[which] for source in sources]
    if len(sources) == 1:
        return dataset_type(
            sources[0], config, sequences=ranges[0], num_samples=num_samples, name=name
        )

    def build_datasets(sample_counts: Sequence[int | None]) -> list[Any]:
        return [
            dataset_type(source, config, sequences=sequences, num_samples=count, name=name)
            for source, sequences, count in zip(sources, ranges, sample_counts, strict=True)
        ]

    weights = path.weights
    if weights is None:
        one_pass = build_datasets([None] * len(sources))
        if num_samples is None:
            return BlendedDataset(one_pass, name=name)
        weights = [float(len(dataset)) for dataset in one_pass]
        if num_samples <= sum(weights):
            return BlendedDataset(one_pass, weights=weights, num_samples=num_samples, name=name)
    if num_samples is None:
        raise ValueError(f"the {name} blend has weights; say how many samples are needed")
    weights = check_weights(weights)
    sample_counts = [max(1, math.ceil(math.ceil(num_samples * w) * BLEND_SURPLUS)) for w in weights]
    return BlendedDataset(
        build_datasets(sample_counts), weights=weights, num_samples=num_samples, name=name
    )
