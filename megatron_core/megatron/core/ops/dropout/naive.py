# SPDX-License-Identifier: Apache-2.0
"""The equation of stateless dropout, one element at a time in Python's integers."""

import torch

_BITS, _GAMMA = (1 << 64) - 1, 0x9E3779B97F4A7C15
_MIX_1, _MIX_2, _COLUMN_SALT = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x5851F42D4C957F2D


def split_mix(key: int, index: int) -> int:
    """Return output `index` of SplitMix64 from the state `key` (Steele et al. 2014)."""
    z = (key + (index + 1) * _GAMMA) & _BITS
    z = (z ^ z >> 30) * _MIX_1 & _BITS
    z = (z ^ z >> 27) * _MIX_2 & _BITS
    return z ^ z >> 31


def dropout(x, *, rate, key, sample_ids, position_ids, feature_offset=0):
    """Return x · keep / (1 - p) for x [s, b, h], p the rate in steps of 2^-16.

    keep: whether 16 bits of a hash reach p 2^16; hash(key, sample, position, feature // 4) has the
    bits of four features.
    """
    dropped = min(round(rate * 65536), 65535)
    keep = torch.zeros_like(x)
    samples = sample_ids.expand(x.shape[:2]).tolist()
    for s, position in enumerate(position_ids.tolist()):
        for b, sample in enumerate(samples[s]):
            row = split_mix(key, split_mix(key, sample) ^ position)
            for h in range(x.shape[2]):
                feature = feature_offset + h
                z = (row + split_mix(key ^ _COLUMN_SALT, feature // 4)) & _BITS
                z = (z ^ z >> 32) * _MIX_2 & _BITS
                bits = (z ^ z >> 29) >> 16 * (feature % 4) & 0xFFFF
                keep[s, b, h] = (bits ^ 0x8000) >= dropped
    return x * keep * (65536 / (65536 - dropped))
