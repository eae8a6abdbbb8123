# SPDX-License-Identifier: Apache-2.0
"""Samples of s + 1 consecutive tokens, joined across documents, in a shuffled order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron.core.datasets.index_cache import IndexCache, digest_of
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.sample_index import (
    build_document_index,
    build_sample_index,
    build_shuffle_index,
    plan_epochs,
)
from megatron.core.datasets.token_rows import TokenRows, documents_between, positions_within


@dataclass(frozen=True, kw_only=True)
class GPTDatasetConfig:
    """What the samples of a run have in common.

    Args:
        sequence_length: s, tokens a model sees at once.
        seed: order of documents and samples.
        vocab_size: token ids must be smaller; None leaves them unchecked.
        eod_token: id of the end-of-document token; needed by the next three only.
        eod_mask_loss: no loss where the input is `eod_token` (what follows it is unrelated).
        reset_position_ids: count positions anew behind each `eod_token`.
        reset_attention_mask: tokens see only their own document, up to its `eod_token`.
        cache_dir: folder for index arrays, local to the node; None builds them in memory.

    Raises:
        ValueError: a value is out of range, or what needs `eod_token` has none.
    """

    sequence_length: int
    seed: int
    vocab_size: int | None = None
    eod_token: int | None = None
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.sequence_length < 1:
            raise ValueError(f"sequence_length {self.sequence_length}: must be 1 or more")
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(f"data seed {self.seed}: must be between 0 and 2^32 - 1")
        for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
            if vars(self)[name] and self.eod_token is None:
                raise ValueError(f"{name} needs eod_token: the tokenizer must have one")


class GPTSample(NamedTuple):
    """One sample; positions are 0 .. s - 1.

    Args:
        tokens: int64 [s].
        labels: int64 [s], the tokens one step later.
        loss_mask: float32 [s], 1 where the loss counts.
    """

    tokens: np.ndarray
    labels: np.ndarray
    loss_mask: np.ndarray


def rows_of(tokens: np.ndarray, config: GPTDatasetConfig) -> TokenRows:
    """Say what `config` makes of the end-of-document tokens in some rows.

    Args:
        tokens: int64 [b, s + 1].
        config: which of loss, positions and attention they end.
    """
    inputs = tokens[:, :-1]
    mask = np.ones(inputs.shape, dtype=np.float32)
    if config.eod_mask_loss:
        mask = (inputs != config.eod_token).astype(np.float32)
    documents = positions = None
    if config.reset_position_ids or config.reset_attention_mask:
        assert config.eod_token is not None  # checked by the config
        documents = documents_between(inputs, config.eod_token)
        positions = positions_within(documents) if config.reset_position_ids else None
    return TokenRows(
        tokens=tokens,
        loss_mask=mask,
        positions=positions,
        document_ids=documents if config.reset_attention_mask else None,
    )


class GPTDataset:
    """Samples over a range of sequences of one data set.

    Args:
        source: the tokens.
        config: length, seed and checks.
        sequences: range of sequence numbers the samples are cut from.
        num_samples: samples needed; the sequences are repeated until they suffice. None means
            one pass.
        name: of the split, for cache files and messages.

    Raises:
        ValueError: the range is empty or outside the data set, its tokens do not make a sample,
            or the data set does not store integers.
    """

    def __init__(
        self,
        source: IndexedDataset,
        config: GPTDatasetConfig,
        *,
        sequences: range,
        num_samples: int | None = None,
        name: str = "train",
    ) -> None:
        if not np.issubdtype(source.dtype, np.integer):
            raise ValueError(f"{source.prefix} stores {source.dtype}; token ids are integers")
        if not 0 <= sequences.start < sequences.stop <= len(source):
            raise ValueError(
                f"the {name} split is sequences {sequences.start} to {sequences.stop} of "
                f"{source.prefix}, which has {len(source)}; give this split a larger share"
            )
        if num_samples is not None and num_samples < 1:
            raise ValueError(f"{num_samples} {name} samples requested; must be 1 or more")
        self.source = source
        self.config = config
        self.name = name
        self._sequences = sequences
        self._requested = num_samples
        try:
            arrays = IndexCache(config.cache_dir).load_or_build(
                f"GPTDataset-{name}",
                self.description,
                self._build,
                names=("document_index", "sample_index", "shuffle_index"),
            )
        except ValueError as error:
            raise ValueError(f"{source.prefix}, {name} split: {error}") from None
        self.document_index = arrays["document_index"]
        self.sample_index = arrays["sample_index"]
        self.shuffle_index = arrays["shuffle_index"]

    @property
    def description(self) -> dict[str, object]:
        """Everything the order and content of the samples depend on, as JSON values."""
        return {
            "class": "GPTDataset",
            "source": self.source.fingerprint,
            "sequences": [self._sequences.start, self._sequences.stop],
            "num_samples": self._requested,
            "sequence_length": self.config.sequence_length,
            "seed": self.config.seed,
        }

    @property
    def fingerprint(self) -> str:
        """Name of the sequence of samples: equal fingerprints, equal training data."""
        return digest_of(self.description)

    def _build(self) -> dict[str, np.ndarray]:
        start, stop, seq = self._sequences.start, self._sequences.stop, self.config.sequence_length
        tokens_per_epoch = int(self.source.lengths[start:stop].sum(dtype=np.int64))
        plan = plan_epochs(tokens_per_epoch, seq, self._requested)
        random = np.random.RandomState(self.config.seed)
        document_index = build_document_index(np.arange(start, stop), plan, random)
        return {
            "document_index": document_index,
            "sample_index": build_sample_index(
                self.source.lengths, document_index, plan, sequence_length=seq
            ),
            "shuffle_index": build_shuffle_index(plan, random),
        }

    def __len__(self) -> int:
        """Return the number of samples; at least as many as requested."""
        return len(self.shuffle_index)

    def batch(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Read several samples.

        Args:
            indices: sample numbers, 0 <= index < len(self), [b].

        Returns:
            int64 [b, s + 1], inputs and labels in one.

        Raises:
            IndexError: there is no such sample.
            ValueError: a token id is negative or not below `vocab_size`; names document and
                position.
        """
        indices = np.asarray(indices, dtype=np.int64)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(
                f"samples {indices.min()} to {indices.max()} of the {self.name} split, which has "
                f"{len(self)}"
            )
        rows = np.empty((len(indices), self.config.sequence_length + 1), dtype=np.int64)
        tokens = self.source.tokens
        for row, index in zip(rows, indices.tolist(), strict=True):
            filled = 0
            for start, count in self._pieces(index):
                row[filled : filled + count] = tokens[start : start + count]
                filled += count
        # As unsigned numbers negative ids are huge: one maximum checks both ends.
        limit = self.config.vocab_size
        if limit is not None and len(rows) and rows.view(np.uint64).max() >= limit:
            self._refuse(rows, indices)
        return rows

    def _pieces(self, index: int) -> list[tuple[int, int]]:
        """List what a sample is made of: (first token in the file, number of tokens).

        Plain integers on purpose: a sample has a handful of pieces, and numpy's cost per call
        would exceed that of the copy.
        """
        number = self.shuffle_index.item(index)
        position, offset = self.sample_index[number].tolist()
        last_position, last_offset = self.sample_index[number + 1].tolist()
        byte_offset, itemsize = self.source.byte_offsets.item, self.source.dtype.itemsize
        length, document = self.source.lengths.item, self.document_index.item
        pieces = []
        while position < last_position:
            sequence = document(position)
            pieces.append((byte_offset(sequence) // itemsize + offset, length(sequence) - offset))
            position, offset = position + 1, 0
        start = byte_offset(document(position)) // itemsize + offset
        pieces.append((start, last_offset + 1 - offset))
        return pieces

    def _refuse(self, rows: np.ndarray, indices: np.ndarray) -> None:
        limit = self.config.vocab_size
        row, column = np.argwhere((rows < 0) | (rows >= limit))[0].tolist()
        places = np.concatenate(  # [s + 1] where in the file each token of the row stands
            [np.arange(start, start + n) for start, n in self._pieces(int(indices[row]))]
        )
        document, sequence, place = self.source.locate(int(places[column]))
        raise ValueError(
            f"{self.source.prefix}: token id {rows[row, column]} at position {place} of document "
            f"{document} (sequence {sequence}) is not below the vocabulary size {limit}; use the "
            "tokenizer the data was written with"
        )

    def loss_mask(self, rows: np.ndarray) -> np.ndarray:
        """Say where the loss counts.

        Args:
            rows: int64 [b, s + 1], from `batch`.

        Returns:
            float32 [b, s].
        """
        return rows_of(rows, self.config).loss_mask

    def read(self, indices: Sequence[int] | np.ndarray) -> TokenRows:
        """Read several samples with all that training needs of them.

        Args:
            indices: sample numbers, 0 <= index < len(self), [b].

        Raises:
            IndexError, ValueError: see `batch`.
        """
        return rows_of(self.batch(indices), self.config)

    def __getitem__(self, index: int) -> GPTSample:
        """Return one sample.

        Args:
            index: sample number, 0 <= index < len(self).

        Raises:
            IndexError: there is no such sample.
            ValueError: see `batch`.
        """
        row = self.batch([index])  # [1, s + 1]
        return GPTSample(tokens=row[0, :-1], labels=row[0, 1:], loss_mask=self.loss_mask(row)[0])
