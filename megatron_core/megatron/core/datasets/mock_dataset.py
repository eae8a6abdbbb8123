# SPDX-License-Identifier: Apache-2.0
"""Samples made up from (seed, split, number): for trying a model or a machine without any file.

A document counts up through the vocabulary by a step of its own, from a start of its own, and ends
with the end-of-document token if there is one. So there is something to learn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, rows_of
from megatron.core.datasets.index_cache import digest_of
from megatron.core.datasets.token_rows import TokenRows

_LARGEST_STEP = 4


class MockDataset:
    """Made-up samples.

    Args:
        config: length, seed and vocabulary.
        num_samples: how many there are; sample i is the same for any number.
        split: 0, 1 or 2; each has samples of its own.
        name: of the split, for messages.

    Raises:
        ValueError: the vocabulary is unknown or too small.
    """

    def __init__(
        self, config: GPTDatasetConfig, *, num_samples: int, split: int = 0, name: str = "train"
    ) -> None:
        if config.vocab_size is None or config.vocab_size < 2 * _LARGEST_STEP:
            raise ValueError(
                f"mock data needs a vocabulary of {2 * _LARGEST_STEP} or more, not "
                f"{config.vocab_size}"
            )
        self.config, self.name = config, name
        self._num_samples, self._split = num_samples, split

    @property
    def description(self) -> dict[str, object]:
        """Everything the content of the samples depends on, as JSON values."""
        return {
            "class": "MockDataset",
            "split": self._split,
            "sequence_length": self.config.sequence_length,
            "seed": self.config.seed,
            "vocab_size": self.config.vocab_size,
            "eod_token": self.config.eod_token,
        }

    @property
    def fingerprint(self) -> str:
        """Name of the sequence of samples: equal fingerprints, equal training data."""
        return digest_of(self.description)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._num_samples

    def read(self, indices: Sequence[int] | np.ndarray) -> TokenRows:
        """Make several samples.

        Args:
            indices: sample numbers, 0 <= index < len(self), [b].

        Raises:
            IndexError: there is no such sample.
        """
        indices = np.asarray(indices, dtype=np.int64)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(
                f"samples {indices.min()} to {indices.max()} of the {self.name} mock data, which "
                f"has {len(self)}"
            )
        return rows_of(np.stack([self._row(index) for index in indices.tolist()]), self.config)

    def _row(self, index: int) -> np.ndarray:
        """Return one sample, int64 [s + 1]."""
        config, length = self.config, self.config.sequence_length + 1
        assert config.vocab_size is not None
        random = np.random.RandomState([config.seed, self._split, index & 0xFFFFFFFF, index >> 32])
        row = np.empty(length, dtype=np.int64)
        at = 0
        while at < length:
            count = min(int(random.randint(length // 4 + 1, length + 1)), length - at)
            start, step = random.randint(config.vocab_size), random.randint(1, _LARGEST_STEP + 1)
            row[at : at + count] = (start + step * np.arange(count)) % config.vocab_size
            at += count
            if config.eod_token is not None:
                row[at - 1] = config.eod_token
        return row
