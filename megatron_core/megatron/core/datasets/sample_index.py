# SPDX-License-Identifier: Apache-2.0
"""Which tokens make up sample i: three index arrays, pure functions of lengths, size and seed.

The sequences of a split are repeated for some epochs, shuffled, and read as one endless line of
tokens cut into samples of s + 1 tokens that overlap by one (the last label of a sample is the first
input of the next):

    document_index  [epochs * sequences]  the order in which sequences are laid out
    sample_index    [N + 1, 2]            (position in document_index, token offset) of token k * s
    shuffle_index   [N]                   the order in which samples are consumed

The arrays equal Megatron's for equal arguments: numpy's frozen RandomState stream, used first for
the document order, then for the sample order.
"""

from dataclasses import dataclass

import numpy as np

# The last epoch is shuffled by itself when less than this share of its samples is used: mixed with
# the others, its unused documents would be drawn from all epochs alike and some never be seen.
SEPARATE_FINAL_EPOCH_BELOW = 0.80
# Temporaries that stay in the cache are several times as fast as whole arrays of them.
_POSITIONS_AT_ONCE = 1 << 15


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """How often the sequences of a split are repeated.

    Args:
        num_epochs: repetitions laid out, at least 1.
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
        num_samples: samples wanted; None means one epoch.

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
    if num_epochs > 1:
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
        random: the stream; advanced.

    Returns:
        int32 [epochs * d].
    """
    groups = [plan.num_epochs - 1, 1] if plan.separate_final_epoch else [plan.num_epochs]
    order = np.tile(documents.astype(np.int32), plan.num_epochs)
    start = 0
    for epochs in groups:
        stop = start + epochs * len(documents)
        random.shuffle(order[start:stop])
        start = stop
    return order


def build_sample_index(
    lengths: np.ndarray, document_index: np.ndarray, plan: EpochPlan, *, sequence_length: int
) -> np.ndarray:
    """Find where every sample starts, without a loop over samples.

    A document holding tokens [a, b) of the line holds the starts k * s with a <= k * s < b: that is
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
    for first in range(0, len(sizes), _POSITIONS_AT_ONCE):
        ends = token + np.cumsum(sizes[first : first + _POSITIONS_AT_ONCE], dtype=np.int64)
        starts = ends - sizes[first : first + _POSITIONS_AT_ONCE]
        counts = np.diff(-(-ends // sequence_length), prepend=row)
        stop = row + int(counts.sum())
        positions = np.repeat(np.arange(len(ends), dtype=dtype), counts)
        index[row:stop, 0] = positions + first
        index[row:stop, 1] = np.arange(row, stop) * sequence_length - starts[positions]
        token, row = int(ends[-1]), stop
    index[0] = 0  # the line starts at its first document even if that one is empty
    return index


def build_shuffle_index(plan: EpochPlan, random: np.random.RandomState) -> np.ndarray:
    """Shuffle the samples; those of a separate final epoch stay behind all others.

    Args:
        plan: repetitions.
        random: the stream, as `build_document_index` left it; advanced.

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
