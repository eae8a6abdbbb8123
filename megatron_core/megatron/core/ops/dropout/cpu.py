# SPDX-License-Identifier: Apache-2.0
"""Dropout masks in plain PyTorch; each 64-bit hash decides for four columns.

Random bits are a function of a key and a logical index, without a generator or state.
"""

from __future__ import annotations

import dataclasses
import hashlib

import torch

_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
MIX = 0x94D049BB133111EB
_BITS = (1 << 64) - 1


def signed(value: int) -> int:
    """Map a 64-bit pattern to the int64 with the same bits."""
    value &= _BITS
    return value - (1 << 64) if value >> 63 else value


def split_mix(state: torch.Tensor) -> torch.Tensor:
    """Hash every int64 with SplitMix64's output function (Steele et al., 2014), in place.

    Args:
        state: int64, any shape; overwritten.

    Returns:
        `state`, now uniformly distributed 64-bit patterns.
    """
    scratch = torch.empty_like(state)
    _shift_xor(state, 30, scratch)
    state.mul_(signed(_MIX_1))
    _shift_xor(state, 27, scratch)
    state.mul_(signed(MIX))
    return _shift_xor(state, 31, scratch)


def _shift_xor(state: torch.Tensor, bits: int, scratch: torch.Tensor) -> torch.Tensor:
    """Compute state ^= state >> bits in place, with a logical shift."""
    torch.bitwise_right_shift(state, bits, out=scratch)
    scratch.bitwise_and_((1 << (64 - bits)) - 1)  # int64 shifts extend the sign: clear those bits
    return state.bitwise_xor_(scratch)


def hash_index(key: int, index: torch.Tensor) -> torch.Tensor:
    """Hash an index under a key: SplitMix64 at position `index` of the stream `key`.

    Args:
        key: any 64-bit integer.
        index: int64, any shape.

    Returns:
        int64 of the same shape; every bit is uniform.
    """
    return split_mix(index.mul(signed(_GAMMA)).add_(signed(key + _GAMMA)))


def mix_rows_and_columns(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Combine hashed rows and hashed columns into one hash per pair, in few passes.

    Both operands are complete SplitMix64 hashes, so one multiply-shift round on their sum suffices
    to break the sum's structure.

    Args:
        rows: int64 [..., 1], hashes.
        columns: int64 broadcastable against rows, hashes.

    Returns:
        int64 of the broadcast shape.
    """
    state = rows + columns
    scratch = torch.empty_like(state)
    _shift_xor(state, 32, scratch)
    state.mul_(signed(MIX))
    return _shift_xor(state, 29, scratch)


def dropout_key(seed: int, *names: str | int) -> int:
    """Derive the 64-bit key of one dropout site, the same in every process.

    Args:
        seed: the run's seed.
        names: identify the site and the step: layer name, iteration, ...

    Returns:
        An int64.
    """
    text = "\x00".join([str(int(seed)), *(f"{type(name).__name__}:{name}" for name in names)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


# One 64-bit hash decides for this many adjacent columns, with 16 bits each: probabilities are
# multiples of 2^-16, and hashing takes a quarter of the time.
COLUMNS_PER_HASH = 4
LEVELS = 1 << 16
_COLUMN_SALT = 0x5851F42D4C957F2D


def drop_levels(rate: float) -> int:
    """Return how many of the 2^16 equally likely levels are dropped at `rate`."""
    return min(round(rate * LEVELS), LEVELS - 1)


def keep_scale(rate: float) -> float:
    """Return 1 / (1 - rate) with the rate rounded to 2^-16, so that the expectation is exact."""
    return LEVELS / (LEVELS - drop_levels(rate))


def column_key(key: int) -> int:
    """Return the key for hashes of column groups, independent of the key for rows."""
    return signed(key ^ _COLUMN_SALT)


def row_hashes(key: int, index: torch.Tensor, *indices: torch.Tensor) -> torch.Tensor:
    """Hash a tuple of broadcastable int64 indices under a key, successively."""
    state = hash_index(key, index)
    for following in indices:
        state = hash_index(key, state ^ following)
    return state


def keep_columns(
    key: int, rows: torch.Tensor, first_column: int, count: int, rate: float
) -> torch.Tensor:
    """Return for every (row, column) whether it is kept.

    Column j uses 16 bits of the hash of (row, j // 4), so the decision depends only on the global
    column, and the mask of a slice is that slice of the full mask.

    Args:
        key: int64 of this dropout site.
        rows: int64 [...], hashes of the rows.
        first_column: global index of the first column.
        count: number of columns.
        rate: probability of dropping.

    Returns:
        bool [..., count], True where kept.
    """
    start = first_column // COLUMNS_PER_HASH
    stop = -(-(first_column + count) // COLUMNS_PER_HASH)
    groups = torch.arange(start, stop, dtype=torch.int64, device=rows.device)
    columns = hash_index(column_key(key), groups)  # [g]
    hashes = mix_rows_and_columns(rows[..., None], columns)  # [..., g]
    levels = hashes.view(torch.int16)  # [..., 4g], uniform over -2^15 .. 2^15 - 1
    offset = first_column - start * COLUMNS_PER_HASH
    keep_mask = levels >= drop_levels(rate) - LEVELS // 2
    return keep_mask[..., offset : offset + count]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionDropout:
    """Dropout of attention probabilities: a function of sample, head and the two positions.

    Args:
        rate: probability of dropping, in [0, 1).
        key: int64 from `dropout_key`.
        sample_ids: int64 [b], global index of each sample.
        head_offset: global index of the first local head.
        sample_length: tokens of each sample if a row packs several samples, which
            `context_parallel.blockwise` then attends to separately; None if a row is one sample.
    """

    rate: float
    key: int
    sample_ids: torch.Tensor
    head_offset: int = 0
    sample_length: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise ValueError(f"AttentionDropout: rate={self.rate} must be in [0, 1)")

    @property
    def scale(self) -> float:
        """Factor on kept probabilities: one over the exact probability of keeping."""
        return keep_scale(self.rate)

    def keep(
        self, heads: int, query_positions: torch.Tensor, first_key: int, num_keys: int
    ) -> torch.Tensor:
        """Return the mask bool [b, n, q, k] for queries at int64 positions [q] and a key range."""
        device = query_positions.device
        head_ids = torch.arange(heads, dtype=torch.int64, device=device) + self.head_offset
        samples = self.sample_ids.to(device=device, dtype=torch.int64)
        rows = row_hashes(
            self.key, samples[:, None, None], head_ids[:, None], query_positions
        )  # [b, n, q]
        return keep_columns(self.key, rows, first_key, num_keys, self.rate)


def dropout_values(
    x: torch.Tensor,
    rate: float,
    key: int,
    sample_ids: torch.Tensor,
    position_ids: torch.Tensor,
    feature_offset: int,
) -> torch.Tensor:
    """Drop and rescale x [s, b, h/tp]; see `ops.dropout.dropout`."""
    rows = row_hashes(key, sample_ids, position_ids[:, None])  # [s, b]
    keep_mask = keep_columns(key, rows, feature_offset, x.shape[-1], rate)  # [s, b, h/tp]
    return (x * keep_scale(rate)).mul_(keep_mask)
