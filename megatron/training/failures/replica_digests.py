# SPDX-License-Identifier: Apache-2.0
"""Numbers that tell whether tensors of different ranks hold the same bits.

In host memory a tensor's number is its digest. On a GPU two sums of its elements as integers are
computed where it lies, modulo 2^64 and so in any order:

    sum of x_i (2i + 1)                     of every piece, pieces joined by an odd factor
    sum of x_i w_i, w_i odd and irregular

A change of one bit changes x_i by a power of two below 2^33, and that times an odd number is not 0
modulo 2^64: it is always seen. Elements that trade places change both sums, except by chance.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.core.dist_checkpointing.digests import digest

#: Elements of a piece: they and their weights take 24 bytes each while they are summed.
PIECE = 1 << 22

#: Odd, from the golden ratio and from SplitMix64, as int64.
_JOIN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64)

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def numbers_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a number of 64 bits, signed, for the bits of each tensor.

    Tensors on a GPU are summed there, and all sums come to the host in one copy.
    """
    sums: dict[int, torch.Tensor] = {}
    weights: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
    for i, tensor in enumerate(tensors):
        if tensor.device.type != "cpu":
            if tensor.device not in weights:
                weights[tensor.device] = sum_weights(tensor.device)
            sums[i] = weighted_sums(tensor, weights[tensor.device])
    both = dict(zip(sums, torch.stack([*sums.values()]).tolist(), strict=True)) if sums else {}
    return [
        number(b"".join(value.to_bytes(8, "little", signed=True) for value in both[i]))
        if i in both
        else number(bits(tensor))
        for i, tensor in enumerate(tensors)
    ]


def number(data: bytes | memoryview) -> int:
    """Return the digest of bytes as a signed number of 64 bits."""
    digits = int(digest(data).rpartition(":")[2], 16)
    return digits - (1 << 64) if digits >> 63 else digits


def bits(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory, row-major."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def sum_weights(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the odd factors of a piece's elements, int64 [piece] twice."""
    odd = 2 * torch.arange(PIECE, dtype=torch.int64, device=device) + 1
    mixed = odd * _MIX
    return odd, (mixed ^ (mixed >> 29)) * _JOIN | 1


def weighted_sums(tensor: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return both sums of a tensor's bits, int64 [2], on its device."""
    elements = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for piece in elements.split(PIECE):
        wide = piece.to(torch.int64)
        sums = [(wide * weight[: piece.numel()]).sum() for weight in weights]
        total = total * _JOIN + torch.stack(sums)
    return total
