# SPDX-License-Identifier: Apache-2.0
"""From the words of a command line to data sets: data paths, blend weights and split shares."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from megatron.core.datasets.blend import BlendedDataset, check_weights
from megatron.core.datasets.chat_dataset import ChatDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset

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
