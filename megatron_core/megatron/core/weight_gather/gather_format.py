# SPDX-License-Identifier: Apache-2.0
"""Gather formats: the encoding of a weight's shards for an all-gather, and its decoding.

A weight is a matrix [r, c]; stacked experts [t, r, c] are a matrix of t · r rows. It is divided
into blocks of `GatherFormat.block` rows and columns that share a scale. r and c need not be
multiples of the block. A *block row* is a row of blocks. The encoding of a block row is its scales,
one byte per block, and then its elements in row-major order; block rows follow one another. A shard
consists of whole block rows, and only the last block row of a weight may have fewer rows, so

    encode(weight) = concatenation of encode(shard) over the shards,

and an all-gather's output is decoded as one weight, however the weight was sharded. A scale of the
whole weight is not gathered: every rank computes it from the largest magnitude over all shards. One
all-reduce finds the largest magnitudes of all weights (`shard_amax`).

| format | elements | scales | bytes of bf16 |
|---|---|---|---|
| bf16 | the weight's own dtype | none | 1 |
| fp8 | E4M3 | fp32 per weight | 0.5 |
| mxfp8 | E4M3 | E8M0 per 32 x 32, or 1 x 32 and 32 x 1 | 0.5005, or 0.5156 each |
| nvfp4 | E2M1 | E4M3 per 16 x 16, or 1 x 16 and 16 x 1, and fp32 | 0.252, or 0.2813 each |

If r of an expert is not a multiple of the block's rows, some blocks hold rows of two experts.

Elements are rounded to nearest, ties to even. Scales bring every finite weight into the range of
the elements (E2M1 saturates where its E4M3 scale was rounded down). A NaN or an infinity makes
every element that shares its scale NaN. A magnitude close to the largest finite value of a dtype
may be rounded to infinity, as in a conversion from fp32 to bf16.

Encoded bytes (except for NaNs) and decoded values are the same on every device: each step is exact
or one correctly rounded fp32 operation. Divisors are tensors, because torch on a GPU multiplies by
the reciprocal of a Python number.

Sources: E4M3 follows Micikevicius et al. 2022 (arXiv 2209.05433); E2M1, E8M0 and blocks of 32
follow the OCP Microscaling Formats (MX) specification v1.0, section 5; NVFP4 and its square blocks,
which give a weight and its transpose the same values, follow NVIDIA 2025 (arXiv 2509.25149) and
Transformer Engine's documentation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias, get_args

import torch
from torch.nn.functional import pad

GatherFormatName: TypeAlias = Literal["bf16", "fp8", "mxfp8", "nvfp4"]
GATHER_FORMATS: tuple[GatherFormatName, ...] = get_args(GatherFormatName)

#: Shapes of the blocks that share a scale: squares, or vectors along one dimension.
ScaleBlocks: TypeAlias = Literal["2d", "1d"]
SCALE_BLOCKS: tuple[ScaleBlocks, ...] = get_args(ScaleBlocks)

#: Largest magnitudes of the element types.
_E4M3_MAX, _E2M1_MAX = 448.0, 6.0

#: Halfway between E4M3's largest value and the next one: rounding of a scale stays below it.
_E4M3_LIMIT = 464.0

#: The bits of 6.0 in fp32.
_E2M1_MAX_BITS = 0x40C00000

#: E4M3's smallest positive value.
_E4M3_TINY = 2.0**-9

#: Smallest scales of a weight: a product with such a scale is still a normal fp32 number.
_FP8_TINY, _NVFP4_TINY = 2.0**-126, 2.0**-117

#: Elements that a CPU converts at a time, so that intermediate results stay in its cache.
_CPU_ELEMENTS = 1 << 18

_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class EncodedWeight:
    """A weight [r, c] for a kernel that multiplies in the gather format.

    Args:
        quantized: quantized elements, uint8 [r, row_bytes].
        scales: scales of the blocks, uint8 [block rows, scale_bytes].
        block: rows and columns that share a scale.
        amax, scale: largest magnitude and scale of the weight, fp32 [1]; None if the format has no
            scale of the weight.
    """

    quantized: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]
    amax: torch.Tensor | None
    scale: torch.Tensor | None

    def first_rows(self, rows: int) -> EncodedWeight:
        """Return the weight without its padding after `rows` rows, in whole block rows."""
        blocks = -(-rows // self.block[0])
        return replace(self, quantized=self.quantized[:rows], scales=self.scales[:blocks])


@dataclass(frozen=True)
class GatherFormat(ABC):
    """An encoding of shards of a weight.

    Args:
        block: rows and columns that share a scale. Shards consist of whole block rows.

    Attributes:
        needs_amax: encode and decode take the largest magnitude of the weight.
    """

    block: tuple[int, int]
    needs_amax: ClassVar[bool] = False

    @abstractmethod
    def row_bytes(self, columns: int) -> int:
        """Return the bytes of the elements of one row."""

    def scale_bytes(self, columns: int) -> int:
        """Return the bytes of the scales of one block row."""
        return -(-columns // self.block[1])

    def encoded_bytes(self, shape: tuple[int, int]) -> int:
        """Return the bytes of an encoded shard or weight [r, c]."""
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

        Encoding decoded values again with the same amax gives the same bytes as long as the values
        are normal numbers, with two exceptions. MXFP8: a block whose largest element was rounded
        to 224 gets 448 and half the scale, which are the same values. NVFP4: a block below 2^-14 of
        the weight's largest magnitude has a subnormal E4M3 scale, and its values may change.

        Args:
            shard: [r, c], contiguous; bf16 or fp32.
            amax: the maximum of `shard_amax` over all shards of the weight, one fp32 element on the
                same device; only if `needs_amax`.
            out: output buffer, [encoded_bytes] uint8; None allocates one.

        Returns:
            [encoded_bytes] uint8.

        Raises:
            ValueError: a shape or dtype that this format does not take, or an amax that is missing
                or not needed.
        """
        self._check(shard, amax)
        size = self.encoded_bytes((shard.shape[0], shard.shape[1]))
        if out is None:
            out = torch.empty(size, dtype=torch.uint8, device=shard.device)
        self._check_encoded(out, size)
        # fp32 on the device: a scale that is read on the host would synchronise.
        scale = self._weight_scale(amax)
        for elements, scales, quantized in self._block_rows(shard, out):
            self._encode(elements, scales, quantized, scale)
        return out

    def decode(
        self,
        encoded: torch.Tensor,
        shape: tuple[int, int],
        *,
        dtype: torch.dtype,
        amax: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the values of a shard, or of a weight from its concatenated encoded shards.

        Args:
            encoded: [encoded_bytes] uint8, without the padding of an all-gather.
            shape: r, c.
            dtype: bf16 or fp32; values are rounded to it once.
            amax: the amax that `encode` was called with.
            out: output buffer, [r, c] in `dtype`, contiguous; None allocates one.

        Returns:
            [r, c].

        Raises:
            ValueError: a shape, dtype or amax that `encode` would refuse.
        """
        self._check_encoded(encoded, self.encoded_bytes(shape))
        if out is None:
            out = torch.empty(shape, dtype=dtype, device=encoded.device)
        if (tuple(out.shape), out.dtype) != (tuple(shape), dtype):
            raise ValueError(
                f"{tuple(shape)} of {dtype} does not fit {tuple(out.shape)} {out.dtype}"
            )
        self._check(out, amax)
        scale = self._weight_scale(amax)
        for elements, scales, quantized in self._block_rows(out, encoded):
            self._decode(elements, scales, quantized, scale)
        return out

    def unpack(
        self,
        encoded: torch.Tensor,
        shape: tuple[int, int],
        *,
        amax: torch.Tensor | None = None,
        out: torch.Tensor,
    ) -> EncodedWeight:
        """Copy the quantized elements and the scales of a weight into two contiguous tensors.

        Args:
            encoded, shape, amax: see `decode`.
            out: [encoded_bytes] uint8, the storage of both tensors.

        Raises:
            ValueError: `encoded` or `out` has another number of bytes.
        """
        size, (rows, columns) = self.encoded_bytes(shape), shape
        self._check_encoded(encoded, size)
        self._check_encoded(out, size)
        elements = rows * self.row_bytes(columns)
        quantized = out[:elements].view(rows, self.row_bytes(columns))
        scales = out[elements:].view(-(-rows // self.block[0]), self.scale_bytes(columns))
        row = block_row = 0
        for count, height, src_scales, src_quantized in self._encoded_block_rows(shape, encoded):
            scales[block_row : block_row + count].copy_(src_scales)
            stop = row + count * height
            quantized[row:stop].view(count, -1).copy_(src_quantized)
            row, block_row = stop, block_row + count
        scale = self._weight_scale(amax)
        if amax is not None:
            amax = amax.reshape(1)
        return EncodedWeight(quantized, scales, self.block, amax, scale)

    def _weight_scale(self, amax: torch.Tensor | None) -> torch.Tensor | None:
        """Return the scale of the weight [1]."""
        return None

    @abstractmethod
    def _encode(
        self,
        elements: torch.Tensor,
        scales: torch.Tensor,
        quantized: torch.Tensor,
        weight_scale: torch.Tensor | None,
    ) -> None:
        """Encode n block rows of h rows each.

        Args:
            elements: [n, h, c].
            scales: [n, scale_bytes] uint8, written.
            quantized: [n, h · row_bytes] uint8, written.
            weight_scale: [1].
        """

    @abstractmethod
    def _decode(
        self,
        elements: torch.Tensor,
        scales: torch.Tensor,
        quantized: torch.Tensor,
        weight_scale: torch.Tensor | None,
    ) -> None:
        """Decode n block rows of h rows each: `_encode` with `elements` as the output."""

    def _block_rows(
        self, matrix: torch.Tensor, encoded: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield views of n block rows at a time: elements [n, h, c], scales [n, scale_bytes] and
        quantized elements [n, h · row_bytes]. A last block row of fewer rows is yielded alone."""
        rows, columns = matrix.shape
        start = 0
        for count, height, scales, quantized in self._encoded_block_rows((rows, columns), encoded):
            stop = start + count * height
            yield matrix[start:stop].view(count, height, columns), scales, quantized
            start = stop

    def _encoded_block_rows(
        self, shape: tuple[int, int], encoded: torch.Tensor
    ) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """Yield n, h and views of the scales and the quantized elements, see `_block_rows`."""
        rows, columns = shape
        if not rows * columns:
            return
        scale_bytes, row_bytes = self.scale_bytes(columns), self.row_bytes(columns)
        height, full = self.block[0], rows // self.block[0]
        step = max(1, _CPU_ELEMENTS // (height * columns)) if encoded.is_cpu else max(1, full)
        spans = [(height, min(step, full - i)) for i in range(0, full, step)]
        if rows > full * height:
            spans.append((rows - full * height, 1))
        # Block rows of full height in groups of a cache's size on a CPU, all at once on a GPU. A
        # last block row of fewer rows has fewer bytes, so it is a group of its own.
        start = 0
        for height, count in spans:
            stop = start + count * (scale_bytes + height * row_bytes)
            encoded_rows = encoded[start:stop].view(count, -1)
            yield count, height, encoded_rows[:, :scale_bytes], encoded_rows[:, scale_bytes:]
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

    def _check_encoded(self, encoded: torch.Tensor, size: int) -> None:
        shape, dtype = tuple(encoded.shape), encoded.dtype
        if (shape, dtype) != ((size,), torch.uint8) or not encoded.is_contiguous():
            raise ValueError(
                f"{type(self).__name__}: {shape} {dtype} for communication: ({size},) of "
                "uint8 is needed"
            )


@dataclass(frozen=True)
class Unquantized(GatherFormat):
    """The bytes of the weight in its own dtype.

    Args:
        dtype: dtype of the weight, bf16 or fp32.
    """

    block: tuple[int, int] = (1, 1)
    dtype: torch.dtype = torch.bfloat16

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of the elements of one row."""
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
        quantized: torch.Tensor,
        weight_scale: torch.Tensor | None,
    ) -> None:
        quantized.copy_(elements.flatten(1).view(torch.uint8))

    def _decode(
        self,
        elements: torch.Tensor,
        scales: torch.Tensor,
        quantized: torch.Tensor,
        weight_scale: torch.Tensor | None,
    ) -> None:
        elements.flatten(1).view(torch.uint8).copy_(quantized)


@dataclass(frozen=True)
class FP8(GatherFormat):
    """E4M3 and one scale per weight, from its present largest magnitude ("current scaling").

        s = amax / 448,    q = E4M3(w / s),    w' = q · s

    q does not exceed 448. If a magnitude of the shard exceeds `amax`, which breaks the contract of
    `encode`, elements near it become NaN; they never saturate.
    """

    block: tuple[int, int] = (1, 1)
    needs_amax: ClassVar[bool] = True

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of the elements of one row."""
        return columns

    def scale_bytes(self, columns: int) -> int:
        """Return 0: the scale belongs to the whole weight and is not gathered."""
        return 0

    def _weight_scale(self, amax: torch.Tensor | None) -> torch.Tensor | None:
        return _amax_scale(amax, _E4M3_MAX, _FP8_TINY)

    def _encode(
        self,
        elements: torch.Tensor,
        scales: torch.Tensor,
        quantized: torch.Tensor,
        weight_scale: torch.Tensor | None,
    ) -> None:
        assert weight_scale is not None
        # Whether torch's conversion to E4M3 saturates or gives NaN depends on its version.
        limit = weight_scale * _E4M3_LIMIT
        exceeds = ~(shard_amax(elements) <= limit)
        scaled = elements / weight_scale.masked_fill(exceeds, torch.nan)
        quantized.view(torch.float8_e4m3fn).copy_(scaled.flatten(1))

    def _decode(
        self,
        elements: torch.Tensor,
        scales: torch.Tensor,
        quantized: torch.Tensor,
        weight_scale: torch.Tensor | None,
    ) -> None:
        assert weight_scale is not None
        elements.copy_(_e4m3_values(quantized, torch.float32).mul_(weight_scale).view_as(elements))


@dataclass(frozen=True)
class MXFP8(GatherFormat):
    """E4M3 and an E8M0 scale, a power of two, per block.

        e = the least integer with max |w| <= 448 · 2^e,    q = E4M3(w / 2^e),    w' = q · 2^e

    e = ceil(log2(max |w| / 448)) follows Mishra et al. 2025 (arXiv 2506.08027), Transformer Engine
    and torchao's RCEIL. The OCP specification v1.0, section 6.3, has floor(log2(max |w|)) - 8
    instead, with which magnitudes above 1.75 · 2^k saturate. e is computed from the bits, without
    rounding. In a block of zeros e is E8M0's smallest, -127.
    """

    block: tuple[int, int] = (32, 32)

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of the elements of one row."""
        return columns

    def _encode(
        self,
        elements: torch.Tensor,
        scales: torch.Tensor,
        quantized: torch.Tensor,
        weight_scale: torch.Tensor | None,
    ) -> None:
        bits = _block_amax(elements, self.block[1])  # [n, k]
        # E8M0 has fp32's bias, and 448 is 1.75 · 2^8: a mantissa above 1.75 carries.
        exponents = (((bits + 0x1FFFFF) >> 23) - 8).clamp_(min=0)
        exponents.masked_fill_(bits >= 0x7F800000, 255)
        scales.copy_(exponents)
        # 2^-e is a normal number, also of bf16; where e is NaN it is -inf.
        inverse = ((254 - exponents) << 23).view(torch.float32).to(elements.dtype)
        scaled = elements * _expand_scales(inverse, self.block[1], elements.shape[2])
        quantized.view(torch.float8_e4m3fn).copy_(scaled.flatten(1))

    def _decode(
        self,
        elements: torch.Tensor,
        scales: torch.Tensor,
        quantized: torch.Tensor,
        weight_scale: torch.Tensor | None,
    ) -> None:
        powers = scales.view(torch.float8_e8m0fnu).to(elements.dtype)
        powers = _expand_scales(powers, self.block[1], elements.shape[2])
        torch.mul(_e4m3_values(quantized, elements.dtype).view_as(elements), powers, out=elements)


@dataclass(frozen=True)
class NVFP4(GatherFormat):
    """E2M1, an E4M3 scale per block and an fp32 scale per weight.

        g = amax / (6 · 448),    b = E4M3(max |w| / 6 / g),    q = E2M1(w / (b · g)),
        w' = q · (b · g)

    b is rounded to nearest, so magnitudes up to 6.4 are rounded to E2M1, which saturates at 6. b is
    at least 2^-9, E4M3's smallest value, where Transformer Engine's may be 0: a block far below the
    largest magnitude then loses less precision, and nothing is divided by zero.
    """

    block: tuple[int, int] = (16, 16)
    needs_amax: ClassVar[bool] = True

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of the elements of one row, two elements per byte, rounded up."""
        return -(-columns // 2)

    def _weight_scale(self, amax: torch.Tensor | None) -> torch.Tensor | None:
        return _amax_scale(amax, _E2M1_MAX * _E4M3_MAX, _NVFP4_TINY)

    def _encode(
        self,
        elements: torch.Tensor,
        scales: torch.Tensor,
        quantized: torch.Tensor,
        weight_scale: torch.Tensor | None,
    ) -> None:
        assert weight_scale is not None
        width, columns = self.block[1], elements.shape[2]
        largest = _block_amax(elements, width).view(torch.float32)  # [n, k]
        block_scale = largest / torch.full_like(weight_scale, _E2M1_MAX) / weight_scale
        # NaN stays NaN. A block scale above the limit means that a magnitude exceeds `amax`.
        block_scale = block_scale.clamp_(min=_E4M3_TINY)
        block_scale.masked_fill_(block_scale > _E4M3_LIMIT, torch.nan)
        stored = scales.view(torch.float8_e4m3fn)
        stored.copy_(block_scale)
        scale = stored.to(torch.float32) * weight_scale
        quantized.copy_(_e2m1_codes(elements / _expand_scales(scale, width, columns)).flatten(1))

    def _decode(
        self,
        elements: torch.Tensor,
        scales: torch.Tensor,
        quantized: torch.Tensor,
        weight_scale: torch.Tensor | None,
    ) -> None:
        assert weight_scale is not None
        columns = elements.shape[2]
        scale = scales.view(torch.float8_e4m3fn).to(torch.float32) * weight_scale
        values = _e2m1_values(quantized).view(*elements.shape[:2], -1)[..., :columns]
        torch.mul(values, _expand_scales(scale, self.block[1], columns), out=elements)


def gather_formats(
    name: str, *, scale_blocks: str = "2d", dtype: torch.dtype = torch.bfloat16
) -> tuple[GatherFormat, ...]:
    """Return the gather format of a weight, or one format for forward and one for backward.

    With square blocks ("2d") forward and backward read the same quantized values. With 1-D blocks
    ("1d") forward reads values whose blocks lie along the rows, backward values whose blocks lie
    along the columns: MX matrix products need blocks along the dimension that they sum over.

    Args:
        name: one of `GATHER_FORMATS`.
        scale_blocks: one of `SCALE_BLOCKS`, the shape of the blocks of mxfp8 and nvfp4.
        dtype: dtype of the weight for the format named "bf16", which encodes nothing.

    Raises:
        ValueError: an unknown name, or 1-D blocks of a format without blocks.
    """
    if name not in GATHER_FORMATS:
        raise ValueError(f"weight gather format {name!r}: use one of {', '.join(GATHER_FORMATS)}")
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

    It is infinite if an element is NaN: a max all-reduce may drop a NaN, but not an infinity.
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
    """Return the largest magnitude of each block of n block rows [n, h, c], as the bits of fp32
    numbers [n, ceil(c / width)] int32.

    The bits of magnitudes are in the order of the magnitudes, with infinity and NaN at the top.
    """
    is_fp32 = elements.dtype == torch.float32
    bits = elements.view(torch.int32 if is_fp32 else torch.int16)
    bits = bits & (0x7FFFFFFF if is_fp32 else 0x7FFF)
    bits = bits.amax(1) if bits.shape[1] > 1 else bits.squeeze(1)  # [n, c]
    if width > 1:  # zeros are neutral to a maximum of magnitudes
        bits = pad(bits, (0, -bits.shape[1] % width)).unflatten(1, (-1, width)).amax(2)
    return bits if is_fp32 else bits.to(torch.int32) << 16  # bf16 is the upper half of fp32


def _expand_scales(scales: torch.Tensor, width: int, columns: int) -> torch.Tensor:
    """Expand the scales of blocks [n, k] to the columns of the blocks, [n, 1, c]."""
    if width > 1:
        scales = scales.unsqueeze(2).expand(-1, -1, width).flatten(1)
    return scales[:, :columns].unsqueeze(1)


def _e4m3_values(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of E4M3 codes [n, m] uint8, exactly."""
    if not codes.is_cpu:
        return codes.view(torch.float8_e4m3fn).to(dtype)
    # On a CPU torch's conversion takes five times as long as a table lookup.
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)
    return table.index_select(0, codes.to(torch.int32).view(-1)).view(codes.shape)


def _e2m1_codes(scaled: torch.Tensor) -> torch.Tensor:
    """Return fp32 [n, h, c], rounded to E2M1, two per byte [n, h, ceil(c / 2)] uint8.

    The first of two is the low nibble, as in torch.float4_e2m1fn_x2. Values are spaced by 0.5 up to
    2, by 1 up to 4 and by 2 up to 6, so that a magnitude a <= 6 has the code
    min(round(2a), round(a) + 2, round(a / 2) + 4); ties go to even codes, whose mantissa is 0.
    """
    bits = scaled.view(torch.int32)
    # Clamped as an integer, NaN saturates too. Its block's scale is NaN, so it decodes to NaN.
    magnitude = (bits & 0x7FFFFFFF).clamp_(max=_E2M1_MAX_BITS).view(torch.float32)
    rounded = (magnitude * 2).round_()
    torch.minimum(rounded, magnitude.round().add_(2), out=rounded)
    torch.minimum(rounded, magnitude.mul_(0.5).round_().add_(4), out=rounded)
    codes = rounded.to(torch.uint8)
    codes |= (bits < 0).view(torch.uint8) << 3
    if codes.shape[2] % 2:
        codes = pad(codes, (0, 1))
    pairs = codes.view(torch.int16)  # little-endian: the first code of a pair is the low byte
    return (pairs | (pairs >> 4)).to(torch.uint8)


def _e2m1_values(packed: torch.Tensor) -> torch.Tensor:
    """Return the values of E2M1 codes, two per byte [n, m] uint8, in fp32 [n, 2m]."""
    codes = torch.arange(256, dtype=torch.int16, device=packed.device)
    codes = torch.stack((codes & 15, codes >> 4), dim=1)
    # E2M1's exponent and mantissa are bits 9 to 11 of an fp16 number that is 2^14 times smaller.
    halves = ((codes & 7) << 9) | ((codes & 8) << 12)
    table = halves.view(torch.float16).to(torch.float32) * 2.0**14  # [256, 2]
    pairs = table.view(torch.int64).view(-1).index_select(0, packed.to(torch.int32).view(-1))
    return pairs.view(torch.float32).view(packed.shape[0], -1)
