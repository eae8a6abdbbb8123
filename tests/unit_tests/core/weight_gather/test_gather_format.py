# SPDX-License-Identifier: Apache-2.0
"""Gather formats: nearest representable values, the same bytes for any sharding, encoded sizes."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.core.weight_gather.gather_format import (
    FP8,
    MXFP8,
    NVFP4,
    SCALE_BLOCKS,
    GatherFormat,
    Unquantized,
    gather_formats,
    shard_amax,
)

SQUARE_FORMATS = (FP8(), MXFP8(), NVFP4())
ALL_FORMATS = (
    *SQUARE_FORMATS,
    *gather_formats("mxfp8", scale_blocks="1d"),
    *gather_formats("nvfp4", scale_blocks="1d"),
)
DTYPES = (torch.bfloat16, torch.float32)


def table(exponent_bits: int, mantissa_bits: int, codes: int) -> torch.Tensor:
    """Return the magnitude of every code of a small floating-point type, by its definition."""
    values = []
    for code in range(codes):
        exponent, mantissa = code >> mantissa_bits, code % (1 << mantissa_bits)
        fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
        values.append(fraction * 2.0 ** (max(exponent, 1) - (1 << (exponent_bits - 1)) + 1))
    return torch.tensor(values, dtype=torch.float64)


E4M3 = table(4, 3, 127)  # 127 is NaN
E2M1 = table(2, 1, 8)


def nearest(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the codes [n] of the nearest values: ties to even, saturating at the largest."""
    distances = (x[:, None] - values).abs()
    is_nearest = distances == distances.amin(1, keepdim=True)
    return torch.where(is_nearest, torch.arange(len(values)) % 2, 2).argmin(1)


def fp32(x: torch.Tensor) -> torch.Tensor:
    """Round fp64 to fp32, as an fp32 operation does (bit-exact for a single quotient)."""
    return x.float().double()


def reference(gather_format: GatherFormat, weight: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """Encode a finite weight block by block; return the bytes and the fp64 values."""
    rows, columns = weight.shape
    w = weight.double()
    amax = w.abs().max()
    height, width = gather_format.block
    if isinstance(gather_format, FP8):
        height, width = w.shape
    encoded: list[int] = []
    values = torch.empty_like(w)
    for top in range(0, rows, height):
        band = w[top : top + height]
        codes = torch.empty(band.shape, dtype=torch.int64)
        for left in range(0, columns, width):
            block = band[:, left : left + width]
            scale = torch.tensor(1.0, dtype=torch.float64)
            if isinstance(gather_format, FP8):
                scale = fp32(amax / 448).clamp(min=2.0**-126)
            elif isinstance(gather_format, MXFP8):
                largest = float(block.abs().max())
                exponent = next(e for e in range(-127, 128) if largest <= 448 * 2.0**e)
                encoded.append(exponent + 127)
                scale *= 2.0**exponent
            else:
                weight_scale = fp32(amax / 2688).clamp(min=2.0**-117)
                scale_ratio = fp32(fp32(block.abs().max() / 6) / weight_scale).clamp(min=2.0**-9)
                encoded.append(int(nearest(scale_ratio[None], E4M3)))
                scale = fp32(E4M3[encoded[-1]] * weight_scale)
            magnitudes = E2M1 if isinstance(gather_format, NVFP4) else E4M3
            block_codes = nearest(fp32(block.abs() / scale).flatten(), magnitudes).view_as(block)
            sign = torch.signbit(block)
            values[top : top + height, left : left + width] = (
                magnitudes[block_codes] * torch.where(sign, -1.0, 1.0) * scale
            )
            codes[:, left : left + width] = (
                block_codes + sign * len(magnitudes) + sign * (magnitudes is E4M3)
            )
        for row in codes.tolist():
            if isinstance(gather_format, NVFP4):
                row += [0] * (columns % 2)
                row = [low + 16 * high for low, high in zip(row[::2], row[1::2], strict=True)]
            encoded += row
    return encoded, values


def weight_of(rows: int, columns: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """Return a weight whose blocks differ in magnitude by up to about 2^24."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-12, 13, (-(-rows // 8), -(-columns // 8)), generator=generator)
    element_exponents = exponents.repeat_interleave(8, 0).repeat_interleave(8, 1)[:rows, :columns]
    return (torch.randn(rows, columns, generator=generator) * 2.0**element_exponents).to(dtype)


def amax_of(gather_format: GatherFormat, *shards: torch.Tensor) -> torch.Tensor | None:
    """Return the maximum over the shards, as the all-reduce does."""
    return torch.stack([shard_amax(s) for s in shards]).max() if gather_format.needs_amax else None


def encode(gather_format: GatherFormat, weight: torch.Tensor) -> torch.Tensor:
    return gather_format.encode(weight, amax=amax_of(gather_format, weight))


def round_trip(gather_format: GatherFormat, weight: torch.Tensor) -> torch.Tensor:
    amax = amax_of(gather_format, weight)
    encoded = gather_format.encode(weight, amax=amax)
    shape = (weight.shape[0], weight.shape[1])
    return gather_format.decode(encoded, shape, dtype=weight.dtype, amax=amax)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gather_format", ALL_FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(64, 64), (75, 51), (5, 3), (33, 1)])
def test_encoding_rounds_to_the_nearest_values(
    gather_format: GatherFormat, shape: tuple[int, int], dtype: torch.dtype
):
    weight = weight_of(*shape, dtype)
    expected, values = reference(gather_format, weight)
    amax = amax_of(gather_format, weight)
    assert gather_format.encode(weight, amax=amax).tolist() == expected
    for target in DTYPES:
        decoded = gather_format.decode(
            torch.tensor(expected, dtype=torch.uint8), shape, dtype=target, amax=amax
        )
        assert same_bits(decoded, values.float().to(target))


@pytest.mark.parametrize("gather_format", ALL_FORMATS, ids=str)
def test_ties_round_to_even(gather_format: GatherFormat):
    # Every value, every midpoint and their fp32 neighbours, in blocks whose scale is 1.
    magnitudes = E2M1 if isinstance(gather_format, NVFP4) else E4M3
    values = torch.cat((magnitudes, (magnitudes[1:] + magnitudes[:-1]) / 2)).float()
    near = torch.cat(
        (values, values.nextafter(magnitudes[-1:].float()), values.nextafter(-values[-1:]))
    )
    near = torch.cat((near, -near))
    weight = torch.cat((near, near.new_zeros(-len(near) % 15))).view(-1, 15)
    largest = magnitudes[-1].float().expand(len(weight), 1)
    weight = torch.cat((largest, weight, largest, weight), 1)  # [n, 32]
    if isinstance(gather_format, NVFP4):  # 2688 = 6 · 448, in separate blocks
        weight = torch.cat((weight, weight.new_full((-len(weight) % 16, 32), 6)))
        weight = torch.cat((weight, weight.new_full((1, 32), 2688)))
    if gather_format.block[1] == 1 < gather_format.block[0]:
        weight = weight.T.contiguous()
    expected, decoded = reference(gather_format, weight)
    assert encode(gather_format, weight).tolist() == expected
    assert torch.equal(round_trip(gather_format, weight).double(), decoded)
    representable = torch.isin(weight.double().abs(), magnitudes)
    assert torch.equal(decoded[representable], weight.double()[representable])
    assert int(representable.sum()) > len(magnitudes)


def test_e8m0_scales_round_up_and_elements_never_saturate():
    gather_format = MXFP8((1, 32))
    for exponent in (*range(-126, -120), -1, 0, 1, *range(114, 120)):
        largest = torch.tensor(448.0 * 2.0**exponent)
        above, below = largest.nextafter(largest * 2), largest.nextafter(largest * 0)
        weight = torch.zeros(3, 32)
        weight[:, 7] = torch.stack((largest, above, below))
        records = gather_format.encode(weight).view(3, 33)
        assert records[:, 0].tolist() == [exponent + 127, exponent + 128, exponent + 127]
        assert records[:, 8].tolist() == [0x7E, 0x76, 0x7E]  # 448, 224, 448
        assert torch.equal(
            gather_format.decode(records.view(-1), (3, 32), dtype=torch.float32)[0], weight[0]
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gather_format", [*ALL_FORMATS, Unquantized()], ids=str)
@pytest.mark.parametrize("tail", [0, 3])
def test_encoding_does_not_depend_on_sharding(
    gather_format: GatherFormat, tail: int, dtype: torch.dtype
):
    if isinstance(gather_format, Unquantized):
        gather_format = Unquantized(dtype=dtype)
    height = gather_format.block[0]
    # Uneven shards of complete block rows, empty shards, and a shard that ends within a block.
    rows = [2 * height, height, 0, 3 * height, tail, 0]
    weight = weight_of(sum(rows), 77, dtype)
    shards = [shard.contiguous() for shard in weight.split(rows)]
    amax = amax_of(gather_format, *shards)
    assert amax is None or torch.equal(amax, weight.abs().max().float())
    encoded_shards = [gather_format.encode(shard, amax=amax) for shard in shards]
    for encoded_shard, shard in zip(encoded_shards, shards, strict=True):
        assert encoded_shard.numel() == gather_format.encoded_bytes((shard.shape[0], 77))
    encoded = torch.cat(encoded_shards)
    assert torch.equal(encoded, gather_format.encode(weight, amax=amax))
    assert torch.equal(encoded, encode(gather_format, weight))
    decoded = gather_format.decode(encoded, (sum(rows), 77), dtype=dtype, amax=amax)
    assert same_bits(decoded, round_trip(gather_format, weight))
    assert same_bits(decoded, weight) == isinstance(gather_format, Unquantized)


@pytest.mark.parametrize("gather_format", ALL_FORMATS, ids=str)
def test_encoding_in_row_bands_gives_the_same_bytes(
    gather_format: GatherFormat, monkeypatch: pytest.MonkeyPatch
):
    weight = weight_of(200, 130, torch.bfloat16)
    expected = encode(gather_format, weight), round_trip(gather_format, weight)
    monkeypatch.setattr("megatron.core.weight_gather.gather_format._CPU_ELEMENTS", 1)
    assert torch.equal(encode(gather_format, weight), expected[0])
    assert same_bits(round_trip(gather_format, weight), expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gather_format", ALL_FORMATS, ids=str)
def test_encoding_decoded_values_gives_the_same_bytes(
    gather_format: GatherFormat, dtype: torch.dtype
):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(96, 160, generator=generator).to(dtype)
    amax = amax_of(gather_format, weight)
    encoded = gather_format.encode(weight, amax=amax)
    decoded = gather_format.decode(encoded, (96, 160), dtype=dtype, amax=amax)
    encoded_again = gather_format.encode(decoded, amax=amax)
    assert same_bits(
        gather_format.decode(encoded_again, (96, 160), dtype=dtype, amax=amax), decoded
    )
    if not isinstance(gather_format, MXFP8):
        assert torch.equal(encoded, encoded_again)
    elif gather_format.block == (1, 32):
        encoded, encoded_again = encoded.view(-1, 5 + 160), encoded_again.view(-1, 5 + 160)
        halved = encoded[:, :5] != encoded_again[:, :5]
        codes = (encoded[:, 5:] & 0x7F).view(-1, 5, 32).amax(2)
        largest = codes == 0x76
        assert torch.equal(halved, largest)  # the scale halves if the largest element became 224
        assert 0 < int(halved.sum()) < halved.numel() / 8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gather_format", ALL_FORMATS, ids=str)
def test_zeros_stay_zeros(gather_format: GatherFormat, dtype: torch.dtype):
    for weight in (torch.zeros(40, 40, dtype=dtype), weight_of(64, 64, dtype)):
        weight[:32, :32] = 0
        weight[3, 3] = -0.0
        decoded = round_trip(gather_format, weight)
        assert same_bits(decoded[:32, :32], weight[:32, :32])
        assert decoded.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gather_format", ALL_FORMATS, ids=str)
@pytest.mark.parametrize("power", [-148, -133, -127, -120, -110, 119])
def test_tiny_and_huge_weights_match_the_reference(
    gather_format: GatherFormat, power: int, dtype: torch.dtype
):
    generator = torch.Generator().manual_seed(power)
    unit = torch.randn(20, 48, generator=generator, dtype=torch.float64)
    weight = (unit * 2.0**power).float().to(dtype)
    expected, values = reference(gather_format, weight)
    assert encode(gather_format, weight).tolist() == expected
    decoded = round_trip(gather_format, weight)
    assert same_bits(decoded, values.float().to(dtype))
    # Below normal numbers the error is bounded by the resolution of the smallest scale.
    if power < -110:
        error = (decoded.double() - weight.double()).abs()
        bound = weight.double().abs() / 16 + 2.0**-136
        if isinstance(gather_format, NVFP4):
            bound = weight.double().abs() / 5 + weight.double().abs().max() / 16 + 2.0**-128
        bounded = bool((error <= bound).all())
        assert bounded


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gather_format", ALL_FORMATS, ids=str)
def test_nan_and_infinity_become_nan(gather_format: GatherFormat, dtype: torch.dtype, bad: float):
    clean = weight_of(70, 70, dtype)
    weight = clean.clone()
    weight[40, 37] = bad
    same_block = torch.zeros(70, 70, dtype=torch.bool)
    height, width = gather_format.block
    same_block[40 // height * height :][:height, 37 // width * width :][:, :width] = True
    decoded = round_trip(gather_format, weight)
    assert shard_amax(weight).isposinf()
    if gather_format.needs_amax:
        assert decoded.isnan().all()
    if isinstance(
        gather_format, NVFP4
    ):  # the block becomes NaN even if the all-reduced amax is finite
        amax = amax_of(gather_format, clean)
        decoded = gather_format.decode(
            gather_format.encode(weight, amax=amax), (70, 70), dtype=dtype, amax=amax
        )
    if isinstance(gather_format, FP8):
        return
    assert torch.equal(decoded.isnan(), same_block)
    assert same_bits(decoded[~same_block], round_trip(gather_format, clean)[~same_block])


def test_amax_too_small_does_not_pass_silently():
    weight = torch.tensor([[1.0, -3.0, 0.5]])
    amax = torch.tensor(2.0)
    decoded = FP8().decode(FP8().encode(weight, amax=amax), (1, 3), dtype=torch.float32, amax=amax)
    assert decoded.isnan().all()
    gather_format = NVFP4((1, 16))
    decoded = gather_format.decode(
        gather_format.encode(weight, amax=amax), (1, 3), dtype=torch.float32, amax=amax
    )
    assert decoded.isnan().all()


@pytest.mark.parametrize("gather_format", ALL_FORMATS, ids=str)
def test_quantization_error_is_within_half_a_spacing(gather_format: GatherFormat):
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(256, 256, generator=generator)
    error = (round_trip(gather_format, weight) - weight).abs()
    height, width = gather_format.block
    if isinstance(gather_format, FP8):
        height, width = weight.shape
    blocks = weight.abs().view(256 // height, height, 256 // width, width)
    largest = blocks.amax((1, 3), keepdim=True).expand_as(blocks).reshape_as(weight)
    # Half a spacing: relative for normal elements, absolute for subnormal elements of a block.
    # E4M3's spacing 2^-9 is at most 2^-16 of the largest magnitude, E2M1's 0.5 at most 0.5 / 5.64.
    if isinstance(gather_format, NVFP4):
        bound = torch.maximum(weight.abs() / 5, largest * (0.25 / 5.64))
        saturated = largest * (0.4 / 6.4)
        bound = torch.maximum(bound, saturated)
    else:
        bound = torch.maximum(weight.abs() / 17, largest * 2.0**-17)
    bounded = bool((error <= bound * (1 + 1e-6)).all())
    assert bounded
    relative = float(error.square().sum().sqrt() / weight.square().sum().sqrt())
    assert relative < (0.12 if isinstance(gather_format, NVFP4) else 0.03)
    assert relative > (0.08 if isinstance(gather_format, NVFP4) else 0.02)


@pytest.mark.parametrize("shape", [(128, 128), (2048, 2048), (150, 1000), (4096, 129)])
def test_encoded_bytes_match_each_format(shape: tuple[int, int]):
    bf16_bytes = 2 * shape[0] * shape[1]
    (gather_format,) = gather_formats("bf16")
    assert gather_format.encoded_bytes(shape) == bf16_bytes
    (gather_format,) = gather_formats("bf16", dtype=torch.float32)
    assert gather_format.encoded_bytes(shape) == 2 * bf16_bytes
    max_ratios = {"fp8": 0.501, "mxfp8": 0.516, "nvfp4": 0.282}
    for name, scale_blocks in itertools.product(max_ratios, SCALE_BLOCKS):
        if (name, scale_blocks) == ("fp8", "1d"):
            continue
        for gather_format in gather_formats(name, scale_blocks=scale_blocks):
            blocks = -(-shape[0] // gather_format.block[0]) * -(-shape[1] // gather_format.block[1])
            row = shape[1] if name != "nvfp4" else -(-shape[1] // 2)
            assert gather_format.encoded_bytes(shape) == shape[0] * row + (
                blocks if name != "fp8" else 0
            )
            if shape[1] % 32 == 0:
                assert gather_format.encoded_bytes(shape) <= max_ratios[name] * bf16_bytes


def test_backward_format_encodes_the_transposed_weight():
    assert gather_formats("mxfp8") == (MXFP8((32, 32)),)
    assert gather_formats("nvfp4") == (NVFP4((16, 16)),)
    forward, backward = gather_formats("mxfp8", scale_blocks="1d")
    weight = weight_of(64, 96, torch.bfloat16)
    assert same_bits(round_trip(backward, weight), round_trip(forward, weight.T.contiguous()).T)
    # With square blocks, the transposed weight has the same values.
    for gather_format in SQUARE_FORMATS:
        assert same_bits(
            round_trip(gather_format, weight), round_trip(gather_format, weight.T.contiguous()).T
        )


def test_encode_and_decode_write_into_out():
    for gather_format in ALL_FORMATS:
        weight = weight_of(40, 33, torch.bfloat16)
        amax = amax_of(gather_format, weight)
        encoded = torch.full((gather_format.encoded_bytes((40, 33)),), 0xA5, dtype=torch.uint8)
        assert gather_format.encode(weight, amax=amax, out=encoded) is encoded
        out = torch.full_like(weight, torch.nan)
        gather_format.decode(encoded, (40, 33), dtype=torch.bfloat16, amax=amax, out=out)
        assert same_bits(out, round_trip(gather_format, weight))


def test_stacked_experts_encode_like_separate_experts():
    experts = weight_of(3 * 64, 48, torch.bfloat16).view(3, 64, 48)
    gather_format = MXFP8()
    separate = torch.stack([round_trip(gather_format, expert) for expert in experts])
    assert same_bits(round_trip(gather_format, experts.view(-1, 48)), separate.view(-1, 48))


def test_invalid_formats_and_arguments_are_refused():
    weight, amax = torch.ones(4, 4), torch.tensor(1.0)
    for invalid_call in (
        lambda: gather_formats("fp4"),
        lambda: gather_formats("mxfp8", scale_blocks="square"),
        lambda: gather_formats("fp8", scale_blocks="1d"),
        lambda: gather_formats("bf16", scale_blocks="1d"),
        lambda: FP8().encode(weight),
        lambda: MXFP8().encode(weight, amax=amax),
        lambda: MXFP8().encode(weight[0]),
        lambda: MXFP8().encode(weight.T[:2].T),
        lambda: MXFP8().encode(weight.half()),
        lambda: MXFP8().encode(weight, out=torch.empty(16, dtype=torch.uint8)),
        lambda: Unquantized().encode(weight),
        lambda: MXFP8().decode(torch.empty(18, dtype=torch.uint8), (4, 4), dtype=torch.float32),
        lambda: MXFP8().decode(
            torch.empty(17, dtype=torch.uint8), (4, 4), dtype=torch.bfloat16, out=weight
        ),
    ):
        with pytest.raises(ValueError):
            invalid_call()
    assert shard_amax(torch.ones(0, 4)) == 0
    assert shard_amax(torch.tensor([[-3.0, 2.0]])) == 3
    assert MXFP8().encode(torch.ones(0, 4)).numel() == 0
