# SPDX-License-Identifier: Apache-2.0
"""GPT samples: s + 1 consecutive tokens of shuffled documents, or synthetic ones.

The sequences of a split are repeated for some epochs, shuffled, and concatenated into one stream of
tokens, which is divided into samples of s + 1 tokens that overlap by one (the last label of a
sample is the first input of the next). Three index arrays, pure functions of lengths, number of
samples and seed, give the tokens of sample i:

    document_index  [epochs * sequences]  the order in which sequences are laid out
    sample_index    [N + 1, 2]            (position in document_index, token offset) of token k * s
    shuffle_index   [N]                   the order in which samples are consumed

The arrays equal Megatron's for equal arguments: numpy's frozen RandomState stream, used first for
the document order, then for the sample order. They depend on the number of samples, which sets the
number of epochs that are shuffled together. A run that is prolonged therefore does not build the
data set anew with more samples. It extends the data set (`extended`), which keeps its samples and
appends passes over the sequences; the order of pass k depends on (seed, k) alone.

Synthetic samples (`MockDataset`), computed from (seed, split, number), need no files. A document
counts up through the vocabulary with its own start and step, so that a model can learn it, and ends
with the end-of-document token if there is one.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron.core.datasets.index_cache import IndexCache, digest_of
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.token_rows import (
    SampleRows,
    checked_indices,
    document_ids_of,
    positions_within,
)

# The last epoch is shuffled by itself if less than this share of its samples is used. Shuffled
# together with the other epochs, its unused samples would be spread over all epochs, and some
# documents might never be seen.
SEPARATE_FINAL_EPOCH_BELOW = 0.80
# A block of temporaries stays in the cache: several times as fast as temporaries for all positions.
_POSITIONS_AT_ONCE = 1 << 15


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """How often the sequences of a split are repeated.

    Args:
        num_epochs: number of repetitions, at least 1.
        separate_final_epoch: the last repetition is shuffled by itself.
        num_samples: N, whole samples in all repetitions.
        num_samples_sans_final: whole samples in all repetitions but the last.
    """

    num_epochs: int
    separate_final_epoch: bool
    num_samples: int
    num_samples_sans_final: int


def plan_epochs(tokens_per_epoch: int, sequence_length: int, num_samples: int | None) -> EpochPlan:
    """Choose the smallest number of epochs that gives enough samples.

    num_epochs = min e with e * tokens_per_epoch >= num_samples * s + 1.

    Args:
        tokens_per_epoch: tokens of the split.
        sequence_length: s.
        num_samples: number of samples needed; None means one epoch.

    Returns:
        The plan.

    Raises:
        ValueError: the split cannot give one sample.
    """
    if tokens_per_epoch < 1 or (num_samples is None and tokens_per_epoch <= sequence_length):
        raise ValueError(
            f"{tokens_per_epoch} tokens are too few for one sample of {sequence_length} tokens and "
            "its last label; use more data, another split or a smaller sequence length"
        )
    num_epochs = 1
    if num_samples is not None:
        num_epochs = max(1, -(-(num_samples * sequence_length + 1) // tokens_per_epoch))
    total = (num_epochs * tokens_per_epoch - 1) // sequence_length
    sans_final = ((num_epochs - 1) * tokens_per_epoch - 1) // sequence_length
    separate = False
    if num_samples is not None and num_epochs > 1:
        per_epoch = (tokens_per_epoch - 1) // sequence_length
        from_final = num_samples - sans_final
        separate = from_final < int(SEPARATE_FINAL_EPOCH_BELOW * per_epoch)
    return EpochPlan(
        num_epochs=num_epochs,
        separate_final_epoch=separate,
        num_samples=total,
        num_samples_sans_final=max(sans_final, 0),
    )


def build_document_index(
    documents: np.ndarray, plan: EpochPlan, random: np.random.RandomState
) -> np.ndarray:
    """Lay out the sequences of all epochs in shuffled order.

    Args:
        documents: sequence numbers of the split, [d].
        plan: repetitions.
        random: random stream; the call advances it.

    Returns:
        int32 [epochs * d].
    """
    epochs_by_shuffle = [plan.num_epochs - 1, 1] if plan.separate_final_epoch else [plan.num_epochs]
    order = np.tile(documents.astype(np.int32), plan.num_epochs)
    start = 0
    for epochs in epochs_by_shuffle:
        stop = start + epochs * len(documents)
        random.shuffle(order[start:stop])
        start = stop
    return order


def build_sample_index(
    lengths: np.ndarray, document_index: np.ndarray, plan: EpochPlan, *, sequence_length: int
) -> np.ndarray:
    """Find where every sample starts, without a loop over samples.

    A document with tokens [a, b) of the stream has the starts k * s with a <= k * s < b. These are
    ceil(b / s) - ceil(a / s) rows, so repeating each position that often gives the first column.

    Args:
        lengths: tokens of every sequence of the data set, indexed by sequence number, [S].
        document_index: from `build_document_index`, [e * d].
        plan: repetitions.
        sequence_length: s.

    Returns:
        [N + 1, 2], int32 where both columns fit, else int64.
    """
    sizes = lengths[document_index]
    largest = max(len(document_index), int(sizes.max(initial=0)))
    dtype = np.int32 if largest <= np.iinfo(np.int32).max - 1 else np.int64
    index = np.empty((plan.num_samples + 1, 2), dtype=dtype)
    token = row = 0
    for block_start in range(0, len(sizes), _POSITIONS_AT_ONCE):
        ends = token + np.cumsum(
            sizes[block_start : block_start + _POSITIONS_AT_ONCE], dtype=np.int64
        )
        starts = ends - sizes[block_start : block_start + _POSITIONS_AT_ONCE]
        counts = np.diff(-(-ends // sequence_length), prepend=row)
        stop = row + int(counts.sum())
        positions = np.repeat(np.arange(len(ends), dtype=dtype), counts)
        index[row:stop, 0] = positions + block_start
        index[row:stop, 1] = np.arange(row, stop) * sequence_length - starts[positions]
        token, row = int(ends[-1]), stop
    index[0] = 0  # the stream starts at its first document, even if that document is empty
    return index


def build_shuffle_index(plan: EpochPlan, random: np.random.RandomState) -> np.ndarray:
    """Shuffle the samples; those of a separate final epoch stay after all others.

    Args:
        plan: repetitions.
        random: random stream after `build_document_index`; the call advances it.

    Returns:
        [N], uint32 where it fits, else int64.
    """
    fits = plan.num_samples < np.iinfo(np.uint32).max - 1
    order = np.arange(plan.num_samples, dtype=np.uint32 if fits else np.int64)
    if plan.separate_final_epoch:
        random.shuffle(order[: plan.num_samples_sans_final])
        random.shuffle(order[plan.num_samples_sans_final :])
    else:
        random.shuffle(order)
    return order


@dataclass(frozen=True, kw_only=True)
class GPTDatasetConfig:
    """Options that all samples of a run share.

    Args:
        sequence_length: s, tokens a model sees at once.
        seed: order of documents and samples.
        vocab_size: token ids must be smaller; None leaves them unchecked.
        eod_token: id of the end-of-document token; only the next three options need it.
        eod_mask_loss: no loss where the input is `eod_token` (the next token is unrelated to it).
        reset_position_ids: count positions anew after each `eod_token`.
        reset_attention_mask: tokens see only their own document, up to its `eod_token`.
        cache_dir: folder for index arrays, local to the node; None builds them in memory.

    Raises:
        ValueError: a value is out of range, or an option needs `eod_token` and it is None.
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


def rows_of(tokens: np.ndarray, config: GPTDatasetConfig) -> SampleRows:
    """Return rows with the loss mask, positions and document ids that `config` asks for.

    Args:
        tokens: int64 [b, s + 1].
        config: whether end-of-document tokens end loss, positions and attention.
    """
    inputs = tokens[:, :-1]
    mask = np.ones(inputs.shape, dtype=np.float32)
    if config.eod_mask_loss:
        mask = (inputs != config.eod_token).astype(np.float32)
    document_ids = positions = None
    if config.reset_position_ids or config.reset_attention_mask:
        assert config.eod_token is not None  # checked by the config
        document_ids = document_ids_of(inputs, config.eod_token)
        positions = positions_within(document_ids) if config.reset_position_ids else None
    return SampleRows(
        tokens=tokens,
        loss_mask=mask,
        positions=positions,
        document_ids=document_ids if config.reset_attention_mask else None,
    )


class GPTDataset:
    """Samples over a range of sequences of one data set.

    Args:
        source: the tokens.
        config: length, seed and checks.
        sequences: range of sequence numbers that the samples are taken from.
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
        self._appended_passes = 0
        try:
            arrays = IndexCache(config.cache_dir).load_or_build(
                f"GPTDataset-{name}",
                self.description,
                self._build,
                names=("document_index", "sample_index", "shuffle_index"),
            )
        except ValueError as error:
            raise ValueError(f"{source.prefix}, {name} split: {error}") from None
        except MemoryError:
            raise ValueError(
                f"{source.prefix}, {name} split: the order of {num_samples} samples does not fit "
                "into memory: ask for fewer"
            ) from None
        self.document_index = arrays["document_index"]
        self.sample_index = arrays["sample_index"]
        self.shuffle_index = arrays["shuffle_index"]

    @property
    def description(self) -> dict[str, object]:
        """JSON values that determine the order and content of the samples."""
        appended = {"appended_passes": n} if (n := self._appended_passes) else {}
        return {
            **appended,
            "class": "GPTDataset",
            "source": self.source.fingerprint,
            "sequences": [self._sequences.start, self._sequences.stop],
            "num_samples": self._requested,
            "sequence_length": self.config.sequence_length,
            "seed": self.config.seed,
        }

    @property
    def fingerprint(self) -> str:
        """Digest of `description`: equal fingerprints mean equal training data."""
        return digest_of(self.description)

    def extended(self, num_samples: int) -> GPTDataset:
        """Return a data set with the samples of this data set, followed by further passes.

        A pass has the smallest number of epochs that gives a sample, usually one. Its samples
        depend only on the seed and the number of the pass, so a longer extension begins with the
        samples of a shorter one.

        Args:
            num_samples: total number of samples needed.
        """
        missing = num_samples - len(self)
        if missing <= 0:
            return self
        plan = self._plan(1)
        longer, passes_before = copy.copy(self), self._appended_passes
        longer._appended_passes = passes_before - (-missing // plan.num_samples)
        passes = range(passes_before + 1, longer._appended_passes + 1)
        arrays = IndexCache(self.config.cache_dir).load_or_build(
            f"GPTDataset-{self.name}",
            longer.description,
            lambda: self._appended(plan, passes),
            names=("document_index", "sample_index", "shuffle_index"),
        )
        longer.document_index = arrays["document_index"]
        longer.sample_index = arrays["sample_index"]
        longer.shuffle_index = arrays["shuffle_index"]
        return longer

    def _appended(self, plan: EpochPlan, passes: range) -> dict[str, np.ndarray]:
        """Return the index arrays, followed by the arrays of some passes. The last row of a pass's
        sample index is the end of its last sample; no sample starts there."""
        document_offset, row_offset = len(self.document_index), len(self.sample_index)
        arrays_by_pass = [(self.document_index, self.sample_index, self.shuffle_index)]
        sequences = np.arange(self._sequences.start, self._sequences.stop)
        for number in passes:
            random = np.random.RandomState([self.config.seed, number])
            document_index = build_document_index(sequences, plan, random)
            sample_index = build_sample_index(
                self.source.lengths,
                document_index,
                plan,
                sequence_length=self.config.sequence_length,
            ).astype(np.int64)
            sample_index[:, 0] += document_offset
            shuffle_index = build_shuffle_index(plan, random).astype(np.int64) + row_offset
            arrays_by_pass.append((document_index, sample_index, shuffle_index))
            document_offset += len(document_index)
            row_offset += len(sample_index)
        document_index, sample_index, shuffle_index = (
            np.concatenate(arrays) for arrays in zip(*arrays_by_pass, strict=True)
        )
        fits_int32 = max(document_offset, row_offset) < np.iinfo(np.int32).max
        return {
            "document_index": document_index,
            "sample_index": sample_index.astype(
                self.sample_index.dtype if fits_int32 else np.int64
            ),
            "shuffle_index": shuffle_index.astype(
                self.shuffle_index.dtype if fits_int32 else np.int64
            ),
        }

    def _plan(self, num_samples: int | None) -> EpochPlan:
        start, stop = self._sequences.start, self._sequences.stop
        tokens_per_epoch = int(self.source.lengths[start:stop].sum(dtype=np.int64))
        return plan_epochs(tokens_per_epoch, self.config.sequence_length, num_samples)

    def _build(self) -> dict[str, np.ndarray]:
        start, stop, seq = self._sequences.start, self._sequences.stop, self.config.sequence_length
        plan = self._plan(self._requested)
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
            ValueError: a token id is negative or not below `vocab_size`; the message names document
                and position.
        """
        indices = checked_indices(indices, len(self), ("samples", f"{self.name} split"))
        rows = np.empty((len(indices), self.config.sequence_length + 1), dtype=np.int64)
        tokens = self.source.tokens
        for row, index in zip(rows, indices.tolist(), strict=True):
            filled = 0
            for start, count in self._token_ranges(index):
                row[filled : filled + count] = tokens[start : start + count]
                filled += count
        # As unsigned numbers negative ids are huge: one maximum checks both ends.
        limit = self.config.vocab_size
        if limit is not None and len(rows) and rows.view(np.uint64).max() >= limit:
            self._refuse(rows, indices)
        return rows

    def _token_ranges(self, index: int) -> list[tuple[int, int]]:
        """List the token ranges of a sample: (first token in the file, number of tokens).

        Plain integers on purpose: a sample has a handful of pieces, and numpy's cost per call
        would exceed that of the copy.
        """
        number = self.shuffle_index.item(index)
        position, offset = self.sample_index[number].tolist()
        last_position, last_offset = self.sample_index[number + 1].tolist()
        byte_offset_of, itemsize = self.source.byte_offsets.item, self.source.dtype.itemsize
        length_of, sequence_at = self.source.lengths.item, self.document_index.item
        token_ranges = []
        while position < last_position:
            sequence = sequence_at(position)
            token_ranges.append(
                (byte_offset_of(sequence) // itemsize + offset, length_of(sequence) - offset)
            )
            position, offset = position + 1, 0
        start = byte_offset_of(sequence_at(position)) // itemsize + offset
        token_ranges.append((start, last_offset + 1 - offset))
        return token_ranges

    def _refuse(self, rows: np.ndarray, indices: np.ndarray) -> None:
        limit = self.config.vocab_size
        row, column = np.argwhere((rows < 0) | (rows >= limit))[0].tolist()
        file_positions = np.concatenate(  # [s + 1], file position of each token of the row
            [np.arange(start, start + n) for start, n in self._token_ranges(int(indices[row]))]
        )
        document, sequence, position = self.source.locate(int(file_positions[column]))
        raise ValueError(
            f"{self.source.prefix}: token id {rows[row, column]} at position {position} of "
            f"document {document} (sequence {sequence}) is not below the vocabulary size {limit}; "
            "use the tokenizer the data was written with"
        )

    def loss_mask(self, rows: np.ndarray) -> np.ndarray:
        """Return the loss mask of rows: 1 where the loss counts.

        Args:
            rows: int64 [b, s + 1], from `batch`.

        Returns:
            float32 [b, s].
        """
        return rows_of(rows, self.config).loss_mask

    def read(self, indices: Sequence[int] | np.ndarray) -> SampleRows:
        """Read several samples with loss mask, positions and document ids.

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


_LARGEST_STEP = 4


class MockDataset:
    """Synthetic samples, see the head of the module.

    Args:
        config: length, seed and vocabulary.
        num_samples: number of samples; sample i is the same for any number.
        split: index of the split, 0, 1 or 2; splits have different samples.
        name: of the split, for messages.

    Raises:
        ValueError: the vocabulary size is None or too small.
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
        """JSON values that determine the content of the samples."""
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
        """Digest of `description`: equal fingerprints mean equal training data."""
        return digest_of(self.description)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._num_samples

    def extended(self, num_samples: int) -> MockDataset:
        """Return a data set with these samples and further ones, at least `num_samples` in all."""
        missing = num_samples - len(self)
        longer = copy.copy(self)
        longer._num_samples += max(missing, 0)
        return longer

    def read(self, indices: Sequence[int] | np.ndarray) -> SampleRows:
        """Compute several samples.

        Args:
            indices: sample numbers, 0 <= index < len(self), [b].

        Raises:
            IndexError: there is no such sample.
        """
        indices = checked_indices(indices, len(self), ("samples", f"{self.name} mock data"))
        return rows_of(np.stack([self._row(index) for index in indices.tolist()]), self.config)

    def _row(self, index: int) -> np.ndarray:
        """Return one sample, int64 [s + 1]."""
        config, length = self.config, self.config.sequence_length + 1
        assert config.vocab_size is not None
        random = np.random.RandomState([config.seed, self._split, index & 0xFFFFFFFF, index >> 32])
        row = np.empty(length, dtype=np.int64)
        filled = 0
        while filled < length:
            count = min(int(random.randint(length // 4 + 1, length + 1)), length - filled)
            start, step = random.randint(config.vocab_size), random.randint(1, _LARGEST_STEP + 1)
            row[filled : filled + count] = (start + step * np.arange(count)) % config.vocab_size
            filled += count
            if config.eod_token is not None:
                row[filled - 1] = config.eod_token
        return row
