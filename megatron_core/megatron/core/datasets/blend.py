# SPDX-License-Identifier: Apache-2.0
"""Blended data sets: data paths, weights and split shares, as a command line gives them.

Samples are drawn from the data sets in the proportions of the weights.
"""

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
from megatron.core.datasets.token_rows import SampleRows

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

    def extended(self, num_samples: int) -> BlendedDataset:
        """Return a blend that begins with all samples of this one, its parts extended as needed.

        Args:
            num_samples: steps in all.

        Raises:
            ValueError: the blend has no weights to go on with.
        """
        if num_samples <= len(self):
            return self
        if self._weights is None:
            raise ValueError(
                f"the {self.name} blend draws each of its {len(self)} samples once: build it with "
                "weights to have more"
            )
        # No part is ahead of its share by a whole sample, see `blend_by_weight`.
        parts = [
            part.extended(math.ceil(weight * num_samples) + 1)
            for part, weight in zip(self.datasets, self._weights, strict=True)
        ]
        return BlendedDataset(
            parts, weights=self._given_weights, num_samples=num_samples, name=self.name
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
        return SampleRows.merge(len(indices), pieces)


# Spare samples of each part of a blend: rounding must not leave one short.
BLEND_SURPLUS = 1.005


@dataclass(frozen=True)
class DataPath:
    """Data sets and their proportions.

    Args:
        prefixes: paths without `.bin` or `.idx`.
        weights: proportions, as given; None means by size.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def parse_data_path(words: Sequence[str]) -> DataPath:
    """Understand `--data-path`: `PREFIX...` or `WEIGHT PREFIX WEIGHT PREFIX ...`.

    Args:
        words: as on the command line.

    Returns:
        Prefixes and weights.

    Raises:
        ValueError: there are no words, or weights stand before only some of the prefixes.
    """
    numbers = [_number(word) for word in words]
    if not words:
        raise ValueError("data path is empty: give PREFIX, or WEIGHT PREFIX WEIGHT PREFIX ...")
    if all(number is None for number in numbers):
        return DataPath(tuple(words), None)
    weights, prefixes = numbers[0::2], words[1::2]
    if len(words) % 2 or None in weights or any(n is not None for n in numbers[1::2]):
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
    """Understand `--split`: shares of training, validation and test, such as "99,1,0".

    Args:
        text: one to three numbers of any sum, separated by commas; missing ones are 0.

    Returns:
        Three shares summing to 1.

    Raises:
        ValueError: the text is not that.
    """
    shares = [_number(part) for part in text.split(",")]
    valid = len(shares) <= 3 and all(
        share is not None and math.isfinite(share) and share >= 0 for share in shares
    )
    if not valid or sum(shares) <= 0:
        raise ValueError(
            f"split {text!r}: give up to three numbers of 0 or more, such as 99,1,0 for training, "
            "validation and test"
        )
    shares += [0.0] * (3 - len(shares))
    total = sum(shares)
    return tuple(share / total for share in shares)


def split_ranges(num_sequences: int, shares: Sequence[float]) -> list[range]:
    """Cut the sequences of a data set, in file order, by shares.

    Args:
        num_sequences: S.
        shares: summing to 1.

    Returns:
        A range of sequence numbers for each share; together they are [0, S).
    """
    borders = [round(border * num_sequences) for border in np.cumsum([0.0, *shares]).tolist()]
    borders[-1] = num_sequences
    return [range(start, stop) for start, stop in pairwise(borders)]


def has_split(sources: Sequence[IndexedDataset], shares: Sequence[float], which: int) -> bool:
    """Say whether a share holds a sequence of every data set.

    Args:
        sources: the data sets of a path.
        shares: of each data set, see `parse_split`.
        which: the share.
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

    Data sets without weights are drawn in proportion to the samples of one pass over each. As in
    megatron-core, each is passed over once if that yields enough samples; it ends there, this goes
    on with further passes.

    Args:
        path: data sets and proportions.
        config: what all samples have in common.
        name: of the split.
        shares: of each data set, see `parse_split`.
        which: the share to take.
        num_samples: samples needed; None means one pass over everything, without weights.
        dataset_type: what samples are made of.
        sources: the data sets of `path`, if they are open already.

    Returns:
        The data set; a blend if there are several prefixes.

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

    def parts(needed: Sequence[int | None]) -> list[Any]:
        return [
            dataset_type(source, config, sequences=cut, num_samples=count, name=name)
            for source, cut, count in zip(sources, ranges, needed, strict=True)
        ]

    weights = path.weights
    if weights is None:
        once = parts([None] * len(sources))
        if num_samples is None:
            return BlendedDataset(once, name=name)
        weights = [float(len(part)) for part in once]
        if num_samples <= sum(weights):
            return BlendedDataset(once, weights=weights, num_samples=num_samples, name=name)
    if num_samples is None:
        raise ValueError(f"the {name} blend has weights; say how many samples are needed")
    weights = check_weights(weights)
    needed = [max(1, math.ceil(math.ceil(num_samples * w) * BLEND_SURPLUS)) for w in weights]
    return BlendedDataset(parts(needed), weights=weights, num_samples=num_samples, name=name)
