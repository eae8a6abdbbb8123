# SPDX-License-Identifier: Apache-2.0
"""Wire formats: the bytes in which a shard of a weight is gathered, and the values they stand for.

A weight is a matrix [r, c] (stacked experts [t, r, c] are its rows) in blocks of `WireFormat.block`
rows and columns that share a scale; r and c need not be multiples of it. A *block row* is a row of
blocks. On the wire block rows follow each other, each one as its scales, one byte a block, and then
its elements in row-major order. A shard is a run of whole block rows, of which only the last one of
the weight may have fewer rows, so

    encode(weight) = concatenation of encode(shard) over the shards,

and what a gather returns is decoded as one weight, however it was sharded. A scale of the whole
weight is not on the wire: every rank computes it from the largest magnitude over all shards, which
one collective finds for all weights (`shard_amax`).

| format | elements | scales | bytes of bf16 |
|---|---|---|---|
| bf16 | the weight's own dtype | none | 1 |
| fp8 | E4M3 | fp32 per weight | 0.5 |
| mxfp8 | E4M3 | E8M0 per 32 x 32, or 1 x 32 and 32 x 1 | 0.5005, or 0.5156 each |
| nvfp4 | E2M1 | E4M3 per 16 x 16, or 1 x 16 and 16 x 1, and fp32 | 0.252, or 0.2813 each |

If r of an expert is no multiple of a block's rows, some blocks hold rows of two experts.

Elements are rounded to nearest, ties to even, and their scales are such that every finite weight is
within the range of the elements (E2M1 saturates where its E4M3 scale was rounded down). A NaN or
an infinity makes every element that shares its scale NaN. A magnitude within the rounding of a
dtype's largest one may become infinite, as it may in a conversion from fp32 to bf16.

Bytes (but for those of NaNs) and decoded values are the same on every device: each step is one
correctly rounded fp32 operation or exact. Divisors are tensors, because torch on a GPU multiplies
by the reciprocal of a Python number.

Sources: E4M3 is that of Micikevicius et al. 2022 (arXiv 2209.05433); E2M1, E8M0 and blocks of 32
are those of the OCP Microscaling Formats (MX) specification v1.0, section 5; NVFP4 and square
blocks, with which a weight and its transpose have the same values, are those of NVIDIA 2025 (arXiv
2509.25149) and of Transformer Engine's documentation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias, get_args

import torch
from torch.nn.functional import pad

GatherFormat: TypeAlias = Literal["bf16", "fp8", "mxfp8", "nvfp4"]
WIRE_FORMATS: tuple[GatherFormat, ...] = get_args(GatherFormat)

#: Shapes of the blocks that share a scale: squares, or runs along one dimension.
ScaleBlocks: TypeAlias = Literal["2d", "1d"]
SCALE_BLOCKS: tuple[ScaleBlocks, ...] = get_args(ScaleBlocks)

#: Largest magnitudes of the element types.
_E4M3_MAX, _E2M1_MAX = 448.0, 6.0

#: Halfway to the value after E4M3's largest: what rounding of a scale leads to stays below.
_E4M3_LIMIT = 464.0

#: The bits of 6.0 in fp32.
_E2M1_MAX_BITS = 0x40C00000

#: E4M3's smallest positive value.
_E4M3_TINY = 2.0**-9

#: Smallest scales of a weight: what they are multiplied with stays a normal fp32 number.
_FP8_TINY, _NVFP4_TINY = 2.0**-126, 2.0**-117

#: Elements that a CPU converts at a time, so that intermediate results stay in its cache.
_CPU_ELEMENTS = 1 << 18

_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class EncodedWeight:
    """A weight [r, c] as a kernel reads it that multiplies in its format.

    Args:
        codes: its elements, uint8 [r, row_bytes].
        scales: of its blocks, uint8 [block rows, scale_bytes].
        block: rows and columns that share a scale.
        amax, scale: fp32 [1], the largest magnitude of the weight and its scale; None if the
            format has none.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]
    amax: torch.Tensor | None
    scale: torch.Tensor | None

    def first(self, rows: int) -> EncodedWeight:
        """Return the first rows, without what a weight was filled up with; whole block rows."""
        blocks = -(-rows // self.block[0])
        return replace(self, codes=self.codes[:rows], scales=self.scales[:blocks])


@dataclass(frozen=True)
class WireFormat(ABC):
    """How shards of a weight are encoded.

    Args:
        block: rows and columns that share a scale. Shards are runs of whole block rows.

    Attributes:
        needs_amax: whether encode and decode take the largest magnitude of the whole weight.
    """

    block: tuple[int, int]
    needs_amax: ClassVar[bool] = False

    @abstractmethod
    def row_bytes(self, columns: int) -> int:
        """Return the bytes that the elements of one row take."""

    def scale_bytes(self, columns: int) -> int:
        """Return the bytes that the scales of one block row take."""
        return -(-columns // self.block[1])

    def wire_bytes(self, shape: tuple[int, int]) -> int:
        """Return the bytes of a shard or a weight [r, c]."""
        rows, columns = shape
        block_rows = -(-rows // self.block[0])
        return rows * self.row_bytes(columns) + block_rows * self.scale_bytes(columns)

    def encode(
        self,
        shard: torch.Tensor,
        *,
        amax: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return a shard in this format.

        Encoding what was decoded, with the same amax, gives the same bytes again as long as values
        are normal numbers, with two exceptions. MXFP8: where a block's largest element was rounded
        to 224 it becomes 448, and the scale half as large, for the same values. NVFP4: in blocks
        below 2^-14 of the weight's largest magnitude, whose E4M3 scale is subnormal, values may
        change once more.

        Args:
            shard: [r, c], contiguous; bf16 or fp32.
            amax: one fp32 element on the same device, the maximum of `shard_amax` over all shards
                of the weight; only if `needs_amax`.
            out: [wire_bytes] uint8, where to write.

        Returns:
            [wire_bytes] uint8.

        Raises:
            ValueError: a shape or dtype that this format does not take, or an amax that is missing
                or not needed.
        """
        self._check(shard, amax)
        size = self.wire_bytes((shard.shape[0], shard.shape[1]))
        if out is None:
            out = torch.empty(size, dtype=torch.uint8, device=shard.device)
        self._check_wire(out, size)
        scale = self._weight_scale(amax)
        for elements, scales, codes in self._bands(shard, out):
            self._encode(elements, scales, codes, scale)
        return out

    def decode(
        self,
        wire: torch.Tensor,
        shape: tuple[int, int],
        *,
        dtype: torch.dtype,
        amax: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the values of a shard, or of a weight whose encoded shards follow each other.

        Args:
            wire: [wire_bytes] uint8, without what a gather padded it with.
            shape: r, c.
            dtype: bf16 or fp32; values are rounded to it once.
            amax: as encode had it.
            out: [r, c] of this dtype, contiguous, where to write.

        Returns:
            [r, c].

        Raises:
            ValueError: as encode.
        """
        self._check_wire(wire, self.wire_bytes(shape))
        if out is None:
            out = torch.empty(shape, dtype=dtype, device=wire.device)
        if (tuple(out.shape), out.dtype) != (tuple(shape), dtype):
            raise ValueError(
                f"{tuple(shape)} of {dtype} does not fit {tuple(out.shape)} {out.dtype}"
            )
        self._check(out, amax)
        scale = self._weight_scale(amax)
        for elements, scales, codes in self._bands(out, wire):
            self._decode(elements, scales, codes, scale)
        return out

    def separate(
        self,
        wire: torch.Tensor,
        shape: tuple[int, int],
        *,
        amax: torch.Tensor | None = None,
        out: torch.Tensor,
    ) -> EncodedWeight:
        """Copy the elements and the scales of a weight apart, each in one piece.

        Args:
            wire, shape, amax: as `decode` has them.
            out: [wire_bytes] uint8, where the copies are.

        Raises:
            ValueError: as decode.
        """
        size, (rows, columns) = self.wire_bytes(shape), shape
        self._check_wire(wire, size)
        self._check_wire(out, size)
        elements = rows * self.row_bytes(columns)
        codes = out[:elements].view(rows, self.row_bytes(columns))
        scales = out[elements:].view(-(-rows // self.block[0]), self.scale_bytes(columns))
        row = block_row = 0
        for count, height, band_scales, band_codes in self._encoded_bands(shape, wire):
            scales[block_row : block_row + count].copy_(band_scales)
            stop = row + count * height
            codes[row:stop].view(count, -1).copy_(band_codes)
            row, block_row = stop, block_row + count
        known = None if amax is None else amax.reshape(1)
        return EncodedWeight(codes, scales, self.block, known, self._weight_scale(amax))

    def _weight_scale(self, amax: torch.Tensor | None) -> torch.Tensor | None:
        """Return the scale of the weight [1]."""
        return None

    @abstractmethod
    def _encode(
        self,
        elements: torch.Tensor,
        scales: torch.Tensor,
        codes: torch.Tensor,
        weight_scale: torch.Tensor | None,
    ) -> None:
        """Encode n block rows of h rows each.

        Args:
            elements: [n, h, c].
            scales: [n, scale_bytes] uint8, written.
            codes: [n, h · row_bytes] uint8, written.
            weight_scale: [1].
        """

    @abstractmethod
    def _decode(
        self,
        elements: torch.Tensor,
        scales: torch.Tensor,
        codes: torch.Tensor,
        weight_scale: torch.Tensor | None,
    ) -> None:
        """Decode n block rows of h rows each; args as `_encode`, elements are written."""

    def _bands(
        self, matrix: torch.Tensor, wire: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield views of block rows: elements [n, h, c], scales [n, scale_bytes] and codes
        [n, h · row_bytes]. The last block row is alone if it has fewer rows."""
        rows, columns = matrix.shape
        start = 0
        for count, height, scales, codes in self._encoded_bands((rows, columns), wire):
            stop = start + count * height
            yield matrix[start:stop].view(count, height, columns), scales, codes
            start = stop

    def _encoded_bands(
        self, shape: tuple[int, int], wire: torch.Tensor
    ) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """Yield n and h of block rows, and views of their scales and codes, see `_bands`."""
        rows, columns = shape
        if not rows * columns:
            return
        scale_bytes, row_bytes = self.scale_bytes(columns), self.row_bytes(columns)
        height, whole = self.block[0], rows // self.block[0]
        step = max(1, _CPU_ELEMENTS // (height * columns)) if wire.is_cpu else max(1, whole)
        spans = [(height, min(step, whole - i)) for i in range(0, whole, step)]
        if rows > whole * height:
            spans.append((rows - whole * height, 1))
        start = 0
        for height, count in spans:
            stop = start + count * (scale_bytes + height * row_bytes)
            band = wire[start:stop].view(count, -1)
            yield count, height, band[:, :scale_bytes], band[:, scale_bytes:]
            start = stop

    def _check(self, matrix: torch.Tensor, amax: torch.Tensor | None) -> None:
        if matrix.dim() != 2 or not matrix.is_contiguous() or matrix.dtype not in _DTYPES:
            raise ValueError(
                f"{type(self).__name__}: {tuple(matrix.shape)} {matrix.dtype}: a contiguous matrix "
                "of bf16 or fp32 is needed"
            )
        if (amax is not None) != self.needs_amax:
            needed = "needs" if self.needs_amax else "does not take"
            raise ValueError(f"{type(self).__name__} {needed} the amax of the weight")

    def _check_wire(self, wire: torch.Tensor, size: int) -> None:
        if (tuple(wire.shape), wire.dtype) != ((size,), torch.uint8) or not wire.is_contiguous():
            raise ValueError(
                f"{type(self).__name__}: {tuple(wire.shape)} {wire.dtype} on the wire: ({size},) "
                "of uint8 is needed"
            )


@dataclass(frozen=True)
class Unquantized(WireFormat):
    """The weight's own bytes.

    Args:
        dtype: the weight's, bf16 or fp32.
    """

    block: tuple[int, int] = (1, 1)
    dtype: torch.dtype = torch.bfloat16

    def row_bytes(self, columns: int) -> int:
        """Return the bytes that the elements of one row take."""
        return columns * self.dtype.itemsize

    def scale_bytes(self, columns: int) -> int:
        """Return 0: there are no scales."""
        return 0

    def _check(self, matrix: torch.Tensor, amax: torch.Tensor | None) -> None:
        super()._check(matrix, amax)
        if matrix.dtype != self.dtype:
            raise ValueError(f"{matrix.dtype}: this weight is gathered in {self.dtype}")

    def _encode(
        self,
        elements: torch.Tensor,
        scales: torch.Tensor,
        codes: torch.Tensor,
        weight_scale: torch.Tensor | None,
    ) -> None:
        codes.copy_(elements.flatten(1).view(torch.uint8))

    def _decode(
        self,
        elements: torch.Tensor,
        scales: torch.Tensor,
        codes: torch.Tensor,
        weight_scale: torch.Tensor | None,
    ) -> None:
        elements.flatten(1).view(torch.uint8).copy_(codes)


@dataclass(frozen=True)
class FP8(WireFormat):
    """E4M3 and one scale per weight, from its largest magnitude now ("current scaling").

        s = amax / 448,    q = E4M3(w / s),    w' = q · s

    q does not exceed 448. If `amax` is smaller than a magnitude of the shard, against what encode
    asks for, elements around that one are NaN; they never saturate.
    """

    block: tuple[int, int] = (1, 1)
    needs_amax: ClassVar[bool] = True

    def row_bytes(self, columns: int) -> int:
        """Return the bytes that the elements of one row take."""
        return columns

    def scale_bytes(self, columns: int) -> int:
        """Return 0: the scale is the weight's."""
        return 0

    def _weight_scale(self, amax: torch.Tensor | None) -> torch.Tensor | None:
        return _amax_scale(amax, _E4M3_MAX, _FP8_TINY)

    def _encode(
        self,
        elements: torch.Tensor,
        scales: torch.Tensor,
        codes: torch.Tensor,
        weight_scale: torch.Tensor | None,
    ) -> None:
        assert weight_scale is not None
        # Whether a conversion to E4M3 saturates depends on torch's version.
        limit = weight_scale * _E4M3_LIMIT
        exceeds = ~(shard_amax(elements) <= limit)
        scaled = elements / weight_scale.masked_fill(exceeds, torch.nan)
        codes.view(torch.float8_e4m3fn).copy_(scaled.flatten(1))

    def _decode(
        self,
        elements: torch.Tensor,
        scales: torch.Tensor,
        codes: torch.Tensor,
        weight_scale: torch.Tensor | None,
    ) -> None:
        assert weight_scale is not None
        elements.copy_(_e4m3_values(codes, torch.float32).mul_(weight_scale).view_as(elements))


@dataclass(frozen=True)
class MXFP8(WireFormat):
    """E4M3 and an E8M0 scale, a power of two, per block.

        e = the least integer with max |w| <= 448 · 2^e,    q = E4M3(w / 2^e),    w' = q · 2^e

    e is that of Mishra et al. 2025 (arXiv 2506.08027), of Transformer Engine and torchao's RCEIL,
    ceil(log2(max |w| / 448)), and not that of the OCP specification v1.0, section 6.3,
    floor(log2(max |w|)) - 8, with which magnitudes of more than 1.75 · 2^k saturate. It is computed
    from the bits, without rounding. In a block of zeros e is E8M0's smallest, -127.
    """

    block: tuple[int, int] = (32, 32)

    def row_bytes(self, columns: int) -> int:
        """Return the bytes that the elements of one row take."""
        return columns

    def _encode(
        self,
        elements: torch.Tensor,
        scales: torch.Tensor,
        codes: torch.Tensor,
        weight_scale: torch.Tensor | None,
    ) -> None:
        bits = _block_amax(elements, self.block[1])  # [n, k]
        # E8M0 has fp32's bias, and 448 is 1.75 · 2^8: a mantissa above 1.75 carries.
        exponents = (((bits + 0x1FFFFF) >> 23) - 8).clamp_(min=0)
        exponents.masked_fill_(bits >= 0x7F800000, 255)
        scales.copy_(exponents)
        # 2^-e is a normal number, also of bf16; where e is NaN it is -inf.
        inverse = ((254 - exponents) << 23).view(torch.float32).to(elements.dtype)
        scaled = elements * _spread(inverse, self.block[1], elements.shape[2])
        codes.view(torch.float8_e4m3fn).copy_(scaled.flatten(1))

    def _decode(
        self,
        elements: torch.Tensor,
        scales: torch.Tensor,
        codes: torch.Tensor,
        weight_scale: torch.Tensor | None,
    ) -> None:
        powers = scales.view(torch.float8_e8m0fnu).to(elements.dtype)
        powers = _spread(powers, self.block[1], elements.shape[2])
        torch.mul(_e4m3_values(codes, elements.dtype).view_as(elements), powers, out=elements)


@dataclass(frozen=True)
class NVFP4(WireFormat):
    """E2M1, an E4M3 scale per block and an fp32 scale per weight.

        g = amax / (6 · 448),    b = E4M3(max |w| / 6 / g),    q = E2M1(w / (b · g)),
        w' = q · (b · g)

    b is rounded to nearest, so that up to 6.4 may be rounded to E2M1, which saturates at 6. b is at
    least 2^-9, E4M3's smallest, also where Transformer Engine's is 0: a block far below the largest
    magnitude then loses less, and nothing is divided by zero.
    """

    block: tuple[int, int] = (16, 16)
    needs_amax: ClassVar[bool] = True

    def row_bytes(self, columns: int) -> int:
        """Return the bytes that the elements of one row take; of an odd number, with padding."""
        return -(-columns // 2)

    def _weight_scale(self, amax: torch.Tensor | None) -> torch.Tensor | None:
        return _amax_scale(amax, _E2M1_MAX * _E4M3_MAX, _NVFP4_TINY)

    def _encode(
        self,
        elements: torch.Tensor,
        scales: torch.Tensor,
        codes: torch.Tensor,
        weight_scale: torch.Tensor | None,
    ) -> None:
        assert weight_scale is not None
        width, columns = self.block[1], elements.shape[2]
        largest = _block_amax(elements, width).view(torch.float32)  # [n, k]
        wanted = largest / torch.full_like(weight_scale, _E2M1_MAX) / weight_scale
        # NaN stays NaN. More than the limit has a magnitude above what amax says.
        wanted = wanted.clamp_(min=_E4M3_TINY).masked_fill_(wanted > _E4M3_LIMIT, torch.nan)
        stored = scales.view(torch.float8_e4m3fn)
        stored.copy_(wanted)
        scale = stored.to(torch.float32) * weight_scale
        codes.copy_(_e2m1_codes(elements / _spread(scale, width, columns)).flatten(1))

    def _decode(
        self,
        elements: torch.Tensor,
        scales: torch.Tensor,
        codes: torch.Tensor,
        weight_scale: torch.Tensor | None,
    ) -> None:
        assert weight_scale is not None
        columns = elements.shape[2]
        scale = scales.view(torch.float8_e4m3fn).to(torch.float32) * weight_scale
        values = _e2m1_values(codes).view(*elements.shape[:2], -1)[..., :columns]
        torch.mul(values, _spread(scale, self.block[1], columns), out=elements)


def wire_formats(
    name: str, *, scale_blocks: str = "2d", dtype: torch.dtype = torch.bfloat16
) -> tuple[WireFormat, ...]:
    """Return the format in which a weight is gathered, or the formats of its two planes.

    With square blocks ("2d") forward and backward read one plane. With 1-D blocks ("1d") forward
    reads a plane whose blocks lie along its rows, backward one whose blocks lie along its columns:
    each along the dimension that its product sums over, as MX products need them.

    Args:
        name: one of `WIRE_FORMATS`.
        scale_blocks: one of `SCALE_BLOCKS`, the shape of the blocks of mxfp8 and nvfp4.
        dtype: of the weight; bf16 is the format for weights of any dtype.

    Raises:
        ValueError: an unknown name, or 1-D blocks of a format without blocks.
    """
    if name not in WIRE_FORMATS:
        raise ValueError(f"weight gather format {name!r}: use one of {', '.join(WIRE_FORMATS)}")
    if scale_blocks not in SCALE_BLOCKS:
        raise ValueError(f"scale blocks {scale_blocks!r}: use {' or '.join(SCALE_BLOCKS)}")
    if name in ("bf16", "fp8"):
        if scale_blocks == "1d":
            raise ValueError(
                f"weight gather format {name!r} has no scale blocks to be 1d: use mxfp8 or nvfp4"
            )
        return (FP8(),) if name == "fp8" else (Unquantized(dtype=dtype),)
    kind, size = (MXFP8, 32) if name == "mxfp8" else (NVFP4, 16)
    return (kind((size, size)),) if scale_blocks == "2d" else (kind((1, size)), kind((size, 1)))


def shard_amax(shard: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of a shard, an fp32 scalar; 0 if the shard is empty.

    It is infinite if an element is NaN: a maximum over ranks may drop a NaN, but no infinity.
    """
    if not shard.numel():
        return torch.zeros((), dtype=torch.float32, device=shard.device)
    low, high = shard.aminmax()
    return torch.maximum(-low, high).float().nan_to_num_(nan=torch.inf, posinf=torch.inf)


def _amax_scale(amax: torch.Tensor | None, largest: float, tiny: float) -> torch.Tensor:
    """Return amax / largest [1], at least `tiny`, NaN if amax is not finite."""
    assert amax is not None
    amax = amax.detach().to(torch.float32).reshape(1)
    scale = (amax / torch.full_like(amax, largest)).clamp_(min=tiny)
    return scale.masked_fill_(~amax.isfinite(), torch.nan)


def _block_amax(elements: torch.Tensor, width: int) -> torch.Tensor:
    """Return the largest magnitudes of n block rows [n, h, c] in columns of blocks, as the bits of
    fp32 numbers [n, ceil(c / width)] int32.

    Magnitudes are ordered as their bits are, with infinity and NaN above all others.
    """
    wide = elements.dtype == torch.float32
    bits = elements.view(torch.int32 if wide else torch.int16)
    bits = bits & (0x7FFFFFFF if wide else 0x7FFF)
    bits = bits.amax(1) if bits.shape[1] > 1 else bits.squeeze(1)  # [n, c]
    if width > 1:
        bits = pad(bits, (0, -bits.shape[1] % width)).unflatten(1, (-1, width)).amax(2)
    return bits if wide else bits.to(torch.int32) << 16


def _spread(scales: torch.Tensor, width: int, columns: int) -> torch.Tensor:
    """Return the scales of blocks [n, k] by column [n, 1, c]."""
    if width > 1:
        scales = scales.unsqueeze(2).expand(-1, -1, width).flatten(1)
    return scales[:, :columns].unsqueeze(1)


def _e4m3_values(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of E4M3 codes [n, m] uint8, exactly."""
    if not codes.is_cpu:
        return codes.view(torch.float8_e4m3fn).to(dtype)
    # torch's conversion on a CPU takes five times as long as looking values up.
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)
    return table.index_select(0, codes.to(torch.int32).view(-1)).view(codes.shape)


def _e2m1_codes(scaled: torch.Tensor) -> torch.Tensor:
    """Return fp32 [n, h, c], rounded to E2M1, two a byte [n, h, ceil(c / 2)] uint8.

    The first of two is the low nibble, as in torch.float4_e2m1fn_x2. Codes are spaced by 0.5 up to
    2, by 1 up to 4 and by 2 up to 6, so that a magnitude a <= 6 has the code
    min(round(2a), round(a) + 2, round(a / 2) + 4); ties go to even codes, whose mantissa is 0.
    """
    bits = scaled.view(torch.int32)
    # Compared as integers, NaN saturates too: it has a code, and its block's scale is NaN.
    magnitude = (bits & 0x7FFFFFFF).clamp_(max=_E2M1_MAX_BITS).view(torch.float32)
    rounded = (magnitude * 2).round_()
    torch.minimum(rounded, magnitude.round().add_(2), out=rounded)
    torch.minimum(rounded, magnitude.mul_(0.5).round_().add_(4), out=rounded)
    codes = rounded.to(torch.uint8)
    codes |= (bits < 0).view(torch.uint8) << 3
    if codes.shape[2] % 2:
        codes = pad(codes, (0, 1))
    pairs = codes.view(torch.int16)  # the first of two is the low byte
    return (pairs | (pairs >> 4)).to(torch.uint8)


def _e2m1_values(packed: torch.Tensor) -> torch.Tensor:
    """Return the values of E2M1 codes, two a byte [n, m] uint8, in fp32 [n, 2m]."""
    codes = torch.arange(256, dtype=torch.int16, device=packed.device)
    codes = torch.stack((codes & 15, codes >> 4), dim=1)
    # E2M1's exponent and mantissa are bits 9 to 11 of an fp16 number that is 2^14 times smaller.
    halves = ((codes & 7) << 9) | ((codes & 8) << 12)
    table = halves.view(torch.float16).to(torch.float32) * 2.0**14  # [256, 2]
    pairs = table.view(torch.int64).view(-1).index_select(0, packed.to(torch.int32).view(-1))
    return pairs.view(torch.float32).view(packed.shape[0], -1)
