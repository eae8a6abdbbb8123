# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning samples: conversations packed into rows of s + 1 tokens.

Two `.bin/.idx` pairs hold the same sequences: PREFIX the token ids, PREFIX.mask a 1 for each token
that counts in the loss. Tokens attend only to their own conversation, with positions from 0. The
rest of a row is a separate document without loss and is marked as padding. The last token of each
conversation is padding as well: it has no label, and no token attends to it. (In a conversation
that fills a row, the last token is only a label.) A conversation of more than s + 1 tokens is
truncated to its first s + 1. A conversation without a token in the loss, after truncation, is left
out. `ChatStatistics` counts both.

The packing of an epoch is a pure function of (lengths, capacity, seed, epoch): it is the same on
any layout and for any length of the run. Sequences are taken in a random order; each goes into the
fullest open row that still has room for it (best fit). The number of open rows is bounded, so rows
consist of neighbours in that order and the cost is a search among a few numbers each.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.index_cache import IndexCache, digest_of
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.token_rows import SampleRows, checked_indices, positions_within

# More open rows fill better: with lengths distributed uniformly up to the capacity, 16 leave 5 % of
# the positions empty, 64 leave 2.4 %, 256 leave 1.6 %.
OPEN_ROWS = 64


def pack_epoch(
    lengths: np.ndarray, capacity: int, *, seed: int, epoch: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pack every sequence once.

    Args:
        lengths: tokens of each sequence, at most `capacity`, [n].
        capacity: tokens of a row.
        seed: seed of the order.
        epoch: 0, 1, ...; each epoch has a different order.

    Returns:
        (members int64 [n], starts int64 [rows + 1]): row r holds the sequences
        members[starts[r] : starts[r + 1]] in this order. Rows are in random order.
    """
    random = np.random.RandomState([seed, epoch])
    order = random.permutation(len(lengths))
    rows = _best_fit(lengths[order].tolist(), capacity)
    shuffled = [rows[i] for i in random.permutation(len(rows)).tolist()]
    sizes = np.array([len(row) for row in shuffled], dtype=np.int64)
    flat = np.fromiter((i for row in shuffled for i in row), dtype=np.int64, count=len(lengths))
    return order[flat], np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def _best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Return the indices into `lengths` of each row's sequences."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for index, length in enumerate(lengths):
        fit = bisect_left(open_rows, (length, -1))
        if fit < len(open_rows):
            free, row = open_rows.pop(fit)
        else:
            free, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        if free > length:
            insort(open_rows, (free - length, row))
            if len(open_rows) > OPEN_ROWS:
                open_rows.pop(0)  # the fullest
    return rows


def mask_prefix(prefix: str) -> str:
    """Return the prefix of the mask that belongs to a chat data set."""
    return f"{prefix}.mask"


@dataclass(frozen=True, kw_only=True)
class ChatStatistics:
    """How the conversations of a data set were packed.

    Args:
        conversations: number of conversations of the split.
        truncated: number of conversations that are longer than a row.
        left_out: number of conversations without a token in the loss, which no row contains.
        rows: number of rows of all passes.
        filled: fraction of the positions of all rows that conversations fill.
    """

    conversations: int
    truncated: int
    left_out: int
    rows: int
    filled: float


class ChatDataset:
    """Packed conversations of a range of sequences of one data set.

    Args:
        source: the token ids.
        config: length, seed and checks.
        sequences: range of sequence numbers, a conversation each.
        num_samples: rows needed; the conversations are repeated until they suffice. None means one
            pass.
        name: of the split, for cache files and messages.

    Raises:
        ValueError: there is no mask, it belongs to other tokens, or no conversation has a token in
            the loss.
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
        if not 0 <= sequences.start < sequences.stop <= len(source):
            raise ValueError(
                f"the {name} split is conversations {sequences.start} to {sequences.stop} of "
                f"{source.prefix}, which has {len(source)}; give this split a larger share"
            )
        self.source, self.config, self.name = source, config, name
        self.mask = _mask_of(source)
        self._sequences, self._requested = sequences, num_samples
        arrays = IndexCache(config.cache_dir).load_or_build(
            f"ChatDataset-{name}",
            self.description,
            self._build,
            names=("members", "row_starts", "counts"),
        )
        self.members, self.row_starts = arrays["members"], arrays["row_starts"]
        self._counts = arrays["counts"]

    @property
    def description(self) -> dict[str, object]:
        """JSON values that determine the order and content of the samples."""
        return {
            "class": "ChatDataset",
            "source": self.source.fingerprint,
            "mask": self.mask.fingerprint,
            "sequences": [self._sequences.start, self._sequences.stop],
            "num_samples": self._requested,
            "sequence_length": self.config.sequence_length,
            "seed": self.config.seed,
        }

    @property
    def fingerprint(self) -> str:
        """Digest of `description`: equal fingerprints mean equal training data."""
        return digest_of(self.description)

    @property
    def statistics(self) -> ChatStatistics:
        """How the conversations were packed."""
        truncated, left_out, tokens = self._counts.tolist()
        num_positions = len(self) * (self.config.sequence_length + 1)
        return ChatStatistics(
            conversations=len(self._sequences),
            truncated=truncated,
            left_out=left_out,
            rows=len(self),
            filled=tokens / num_positions,
        )

    def _build(self) -> dict[str, np.ndarray]:
        capacity, seed = self.config.sequence_length + 1, self.config.seed
        lengths = self.source.lengths[self._sequences.start : self._sequences.stop]
        lengths = lengths.astype(np.int64)
        usable = np.flatnonzero(self._num_loss_tokens(lengths, capacity))
        if not len(usable):
            raise ValueError(
                f"{self.source.prefix}, {self.name} split: its {len(lengths)} conversations "
                f"have no assistant token among the first {capacity}, so no token has a loss; "
                "raise --seq-length or give other data"
            )
        truncated_lengths = np.minimum(lengths[usable], capacity)
        members, starts = [], [np.zeros(1, np.int64)]
        rows = epoch = 0
        while rows == 0 or (self._requested is not None and rows < self._requested):
            epoch_members, epoch_starts = pack_epoch(
                truncated_lengths, capacity, seed=seed, epoch=epoch
            )
            members.append(usable[epoch_members] + self._sequences.start)
            starts.append(epoch_starts[1:] + epoch * len(usable))
            rows, epoch = rows + len(epoch_starts) - 1, epoch + 1
        counts = [int((lengths > capacity).sum()), len(lengths) - len(usable)]
        return {
            "members": np.concatenate(members),
            "row_starts": np.concatenate(starts),
            "counts": np.array([*counts, int(truncated_lengths.sum()) * epoch], dtype=np.int64),
        }

    def _num_loss_tokens(self, lengths: np.ndarray, capacity: int) -> np.ndarray:
        """Count the tokens in the loss of each conversation; its first token is never a label."""
        counts = np.zeros(len(lengths), dtype=np.int64)
        for i, length in enumerate(lengths.tolist()):
            begin = self._begin(self.mask, self._sequences.start + i)
            counts[i] = np.count_nonzero(
                self.mask.tokens[begin + 1 : begin + min(length, capacity)]
            )
        return counts

    def extended(self, num_samples: int) -> ChatDataset:
        """Return a data set with the rows of this data set, followed by further passes.

        Args:
            num_samples: total number of rows needed.
        """
        if num_samples <= len(self):
            return self
        return ChatDataset(
            self.source,
            self.config,
            sequences=self._sequences,
            num_samples=num_samples,
            name=self.name,
        )

    @staticmethod
    def _begin(data: IndexedDataset, sequence: int) -> int:
        """Return the position of a sequence's first token in `data.tokens`."""
        return data.byte_offsets.item(sequence) // data.dtype.itemsize

    def __len__(self) -> int:
        """Return the number of rows; at least as many as requested."""
        return len(self.row_starts) - 1

    def read(self, indices: Sequence[int] | np.ndarray) -> SampleRows:
        """Read several rows.

        Args:
            indices: row numbers, 0 <= index < len(self), [b].

        Raises:
            IndexError: there is no such row.
            ValueError: a token id is negative or not below `vocab_size`.
        """
        indices = checked_indices(indices, len(self), ("rows", f"{self.name} split"))
        capacity, pad_token = self.config.sequence_length + 1, self.config.eod_token or 0
        tokens = np.full((len(indices), capacity), pad_token, dtype=np.int64)
        loss_mask = np.zeros((len(indices), capacity), dtype=np.float32)
        document_ids = np.zeros((len(indices), capacity), dtype=np.int32)
        padding = np.zeros((len(indices), capacity), dtype=np.bool_)
        for row, index in enumerate(indices.tolist()):
            start, stop = self.row_starts[index : index + 2].tolist()
            begin = 0
            for number, sequence in enumerate(self.members[start:stop].tolist()):
                end = min(begin + self.source.lengths.item(sequence), capacity)
                for data, target in ((self.source, tokens), (self.mask, loss_mask)):
                    file_begin = self._begin(data, sequence)
                    target[row, begin:end] = data.tokens[file_begin : file_begin + end - begin]
                self._check(tokens[row, begin:end], sequence)
                loss_mask[row, begin] = 0  # no token of this conversation predicts its first token
                document_ids[row, begin:end] = number
                padding[row, end - 1] = True
                begin = end
            document_ids[row, begin:] = stop - start
            padding[row, begin:] = True
        document_ids = document_ids[:, :-1]
        return SampleRows(
            tokens=tokens,
            loss_mask=loss_mask[:, 1:],
            positions=positions_within(document_ids),
            document_ids=document_ids,
            padding=padding[:, :-1],
        )

    def _check(self, tokens: np.ndarray, sequence: int) -> None:
        limit = self.config.vocab_size
        if limit is None or not len(tokens) or tokens.view(np.uint64).max() < limit:
            return
        position = int(np.argmax((tokens < 0) | (tokens >= limit)))
        raise ValueError(
            f"{self.source.prefix}: token id {tokens[position]} at position {position} of "
            f"conversation {sequence} is not below the vocabulary size {limit}; use the tokenizer "
            "the data was written with"
        )


def _mask_of(source: IndexedDataset) -> IndexedDataset:
    """Open the mask of a chat data set and compare it with the tokens."""
    try:
        mask = IndexedDataset(mask_prefix(source.prefix))
    except ValueError as error:
        raise ValueError(
            f"{source.prefix} is not a chat data set: {error} Write it with python -m "
            "megatron.training.preprocess_data --chat"
        ) from None
    if mask.dtype != np.uint8 or not np.array_equal(mask.lengths, source.lengths):
        raise ValueError(
            f"{mask.prefix} has {len(mask)} sequences of {mask.dtype}, {source.prefix} "
            f"{len(source)}: the mask belongs to other tokens; write both again"
        )
    return mask
