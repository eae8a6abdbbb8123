# SPDX-License-Identifier: Apache-2.0
"""Random bits as a function of a key and a logical index: no generator, no state."""

from __future__ import annotations

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
    """Scramble every int64 by SplitMix64's output function (Steele et al., 2014), in place.

    Args:
        state: int64, any shape; overwritten.

    Returns:
        `state`, holding uniformly distributed 64-bit patterns.
    """
    scratch = torch.empty_like(state)
    _shift_xor(state, 30, scratch)
    state.mul_(signed(_MIX_1))
    _shift_xor(state, 27, scratch)
    state.mul_(signed(MIX))
    return _shift_xor(state, 31, scratch)


def _shift_xor(state: torch.Tensor, bits: int, scratch: torch.Tensor) -> torch.Tensor:
    """Compute state ^= state >> bits, the shift filling with zeros, in place."""
    torch.bitwise_right_shift(state, bits, out=scratch)
    scratch.bitwise_and_((1 << (64 - bits)) - 1)  # int64 shifts copy the sign: clear it
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

    Both sides went through the whole of SplitMix64, so that one multiply-shift round on their sum
    is enough to break the sum's structure.

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
        names: what tells the site and the step apart: layer name, iteration, ...

    Returns:
        An int64.
    """
    text = "\x00".join([str(int(seed)), *(f"{type(name).__name__}:{name}" for name in names)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
