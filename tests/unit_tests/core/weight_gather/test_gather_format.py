# SPDX-License-Identifier: Apache-2.0
"""Wire formats: nearest representable values, the same however a weight is sharded, few bytes."""

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

SQUARE = (FP8(), MXFP8(), NVFP4())
ALL = (
    *SQUARE,
    *gather_formats("mxfp8", scale_blocks="1d"),
    *gather_formats("nvfp4", scale_blocks="1d"),
)
DTYPES = (torch.bfloat16, torch.float32)


def table(exponent_bits: int, mantissa_bits: int, codes: int) -> torch.Tensor:
    """Return the magnitudes of the codes of a small floating-point type, by its definition."""
    values = []
    for code in range(codes):
        exponent, mantissa = code >> mantissa_bits, code % (1 << mantissa_bits)
        fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
        values.append(fraction * 2.0 ** (max(exponent, 1) - (1 << (exponent_bits - 1)) + 1))
    return torch.tensor(values, dtype=torch.float64)


E4M3 = table(4, 3, 127)  # 127 is NaN
E2M1 = table(2, 1, 8)


def nearest(magnitudes: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the codes [n] of the nearest values, the even one of two; above the last, the last."""
    distances = (magnitudes[:, None] - values).abs()
    nearest = distances == distances.amin(1, keepdim=True)
    return torch.where(nearest, torch.arange(len(values)) % 2, 2).argmin(1)


def fp32(x: torch.Tensor) -> torch.Tensor:
    """Round fp64 to fp32, as one fp32 operation does (exact to the bit for one quotient)."""
    return x.float().double()


def reference(form: GatherFormat, weight: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """Return the bytes and the values in fp64 of a finite weight, block by block."""
    rows, columns = weight.shape
    w = weight.double()
    amax = w.abs().max()
    height, width = form.block
    if isinstance(form, FP8):
        height, width = w.shape
    wire: list[int] = []
    values = torch.empty_like(w)
    for top in range(0, rows, height):
        band = w[top : top + height]
        codes = torch.empty(band.shape, dtype=torch.int64)
        for left in range(0, columns, width):
            block = band[:, left : left + width]
            scale = torch.tensor(1.0, dtype=torch.float64)
            if isinstance(form, FP8):
                scale = fp32(amax / 448).clamp(min=2.0**-126)
            elif isinstance(form, MXFP8):
                largest = float(block.abs().max())
                exponent = next(e for e in range(-127, 128) if largest <= 448 * 2.0**e)
                wire.append(exponent + 127)
                scale *= 2.0**exponent
            else:
                whole = fp32(amax / 2688).clamp(min=2.0**-117)
                wanted = fp32(fp32(block.abs().max() / 6) / whole).clamp(min=2.0**-9)
                wire.append(int(nearest(wanted[None], E4M3)))
                scale = fp32(E4M3[wire[-1]] * whole)
            kind = E2M1 if isinstance(form, NVFP4) else E4M3
            found = nearest(fp32(block.abs() / scale).flatten(), kind).view_as(block)
            sign = torch.signbit(block)
            values[top : top + height, left : left + width] = (
                kind[found] * torch.where(sign, -1.0, 1.0) * scale
            )
            codes[:, left : left + width] = found + sign * len(kind) + sign * (kind is E4M3)
        for row in codes.tolist():
            if isinstance(form, NVFP4):
                row += [0] * (columns % 2)
                row = [low + 16 * high for low, high in zip(row[::2], row[1::2], strict=True)]
            wire += row
    return wire, values


def weight_of(rows: int, columns: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """Return a weight whose blocks differ in magnitude by up to 2^24 or so."""
    generator = torch.Generator().manual_seed(seed)
    tall = torch.randint(-12, 13, (-(-rows // 8), -(-columns // 8)), generator=generator)
    spread = tall.repeat_interleave(8, 0).repeat_interleave(8, 1)[:rows, :columns]
    return (torch.randn(rows, columns, generator=generator) * 2.0**spread).to(dtype)


def amax_of(form: GatherFormat, *shards: torch.Tensor) -> torch.Tensor | None:
    """Return what the collective over the shards returns."""
    return torch.stack([shard_amax(s) for s in shards]).max() if form.needs_amax else None


def encoded(form: GatherFormat, weight: torch.Tensor) -> torch.Tensor:
    return form.encode(weight, amax=amax_of(form, weight))


def round_trip(form: GatherFormat, weight: torch.Tensor) -> torch.Tensor:
    amax = amax_of(form, weight)
    wire = form.encode(weight, amax=amax)
    shape = (weight.shape[0], weight.shape[1])
    return form.decode(wire, shape, dtype=weight.dtype, amax=amax)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ALL, ids=str)
@pytest.mark.parametrize("shape", [(64, 64), (75, 51), (5, 3), (33, 1)])
def test_bytes_and_values_are_the_nearest_representable(
    form: GatherFormat, shape: tuple[int, int], dtype: torch.dtype
):
    weight = weight_of(*shape, dtype)
    wire, values = reference(form, weight)
    amax = amax_of(form, weight)
    assert form.encode(weight, amax=amax).tolist() == wire
    for target in DTYPES:
        decoded = form.decode(torch.tensor(wire, dtype=torch.uint8), shape, dtype=target, amax=amax)
        assert same_bits(decoded, values.float().to(target))


@pytest.mark.parametrize("form", ALL, ids=str)
def test_ties_go_to_even_codes(form: GatherFormat):
    # Every value, every middle of two and their neighbours in fp32, in blocks whose scale is 1.
    kind = E2M1 if isinstance(form, NVFP4) else E4M3
    values = torch.cat((kind, (kind[1:] + kind[:-1]) / 2)).float()
    near = torch.cat((values, values.nextafter(kind[-1:].float()), values.nextafter(-values[-1:])))
    near = torch.cat((near, -near))
    weight = torch.cat((near, near.new_zeros(-len(near) % 15))).view(-1, 15)
    largest = kind[-1].float().expand(len(weight), 1)
    weight = torch.cat((largest, weight, largest, weight), 1)  # [n, 32]
    if isinstance(form, NVFP4):  # 2688 is 6 · 448, in blocks of its own
        weight = torch.cat((weight, weight.new_full((-len(weight) % 16, 32), 6)))
        weight = torch.cat((weight, weight.new_full((1, 32), 2688)))
    if form.block[1] == 1 < form.block[0]:
        weight = weight.T.contiguous()
    wire, decoded = reference(form, weight)
    assert encoded(form, weight).tolist() == wire
    assert torch.equal(round_trip(form, weight).double(), decoded)
    kept = torch.isin(weight.double().abs(), kind)
    assert torch.equal(decoded[kept], weight.double()[kept])
    assert int(kept.sum()) > len(kind)


def test_e8m0_scales_round_up_and_elements_never_saturate():
    form = MXFP8((1, 32))
    for exponent in (*range(-126, -120), -1, 0, 1, *range(114, 120)):
        largest = torch.tensor(448.0 * 2.0**exponent)
        above, below = largest.nextafter(largest * 2), largest.nextafter(largest * 0)
        weight = torch.zeros(3, 32)
        weight[:, 7] = torch.stack((largest, above, below))
        records = form.encode(weight).view(3, 33)
        assert records[:, 0].tolist() == [exponent + 127, exponent + 128, exponent + 127]
        assert records[:, 8].tolist() == [0x7E, 0x76, 0x7E]  # 448, 224, 448
        assert torch.equal(
            form.decode(records.view(-1), (3, 32), dtype=torch.float32)[0], weight[0]
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [*ALL, Unquantized()], ids=str)
@pytest.mark.parametrize("tail", [0, 3])
def test_values_do_not_depend_on_the_shards(form: GatherFormat, tail: int, dtype: torch.dtype):
    if isinstance(form, Unquantized):
        form = Unquantized(dtype=dtype)
    height = form.block[0]
    # Uneven shards of whole block rows, an empty one, and a last one that ends within a block.
    rows = [2 * height, height, 0, 3 * height, tail, 0]
    weight = weight_of(sum(rows), 77, dtype)
    shards = [shard.contiguous() for shard in weight.split(rows)]
    amax = amax_of(form, *shards)
    assert amax is None or torch.equal(amax, weight.abs().max().float())
    parts = [form.encode(shard, amax=amax) for shard in shards]
    for part, shard in zip(parts, shards, strict=True):
        assert part.numel() == form.encoded_bytes((shard.shape[0], 77))
    wire = torch.cat(parts)
    assert torch.equal(wire, form.encode(weight, amax=amax))
    assert torch.equal(wire, encoded(form, weight))
    decoded = form.decode(wire, (sum(rows), 77), dtype=dtype, amax=amax)
    assert same_bits(decoded, round_trip(form, weight))
    assert same_bits(decoded, weight) == isinstance(form, Unquantized)


@pytest.mark.parametrize("form", ALL, ids=str)
def test_a_band_at_a_time_gives_the_same_bytes(form: GatherFormat, monkeypatch: pytest.MonkeyPatch):
    weight = weight_of(200, 130, torch.bfloat16)
    whole = encoded(form, weight), round_trip(form, weight)
    monkeypatch.setattr("megatron.core.weight_gather.gather_format._CPU_ELEMENTS", 1)
    assert torch.equal(encoded(form, weight), whole[0])
    assert same_bits(round_trip(form, weight), whole[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ALL, ids=str)
def test_encoding_decoded_values_gives_the_same_bytes(form: GatherFormat, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(96, 160, generator=generator).to(dtype)
    amax = amax_of(form, weight)
    first = form.encode(weight, amax=amax)
    decoded = form.decode(first, (96, 160), dtype=dtype, amax=amax)
    second = form.encode(decoded, amax=amax)
    assert same_bits(form.decode(second, (96, 160), dtype=dtype, amax=amax), decoded)
    if not isinstance(form, MXFP8):
        assert torch.equal(first, second)
    elif form.block == (1, 32):
        first, second = first.view(-1, 5 + 160), second.view(-1, 5 + 160)
        halved = first[:, :5] != second[:, :5]
        codes = (first[:, 5:] & 0x7F).view(-1, 5, 32).amax(2)
        largest = codes == 0x76
        assert torch.equal(halved, largest)  # those whose largest element became 224
        assert 0 < int(halved.sum()) < halved.numel() / 8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ALL, ids=str)
def test_zeros_stay_zeros(form: GatherFormat, dtype: torch.dtype):
    for weight in (torch.zeros(40, 40, dtype=dtype), weight_of(64, 64, dtype)):
        weight[:32, :32] = 0
        weight[3, 3] = -0.0
        decoded = round_trip(form, weight)
        assert same_bits(decoded[:32, :32], weight[:32, :32])
        assert decoded.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ALL, ids=str)
@pytest.mark.parametrize("power", [-148, -133, -127, -120, -110, 119])
def test_tiny_and_huge_weights(form: GatherFormat, power: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(power)
    unit = torch.randn(20, 48, generator=generator, dtype=torch.float64)
    weight = (unit * 2.0**power).float().to(dtype)
    wire, values = reference(form, weight)
    assert encoded(form, weight).tolist() == wire
    decoded = round_trip(form, weight)
    assert same_bits(decoded, values.float().to(dtype))
    # Below normal numbers what the scale cannot resolve is lost, but no more than that.
    if power < -110:
        error = (decoded.double() - weight.double()).abs()
        bound = weight.double().abs() / 16 + 2.0**-136
        if isinstance(form, NVFP4):
            bound = weight.double().abs() / 5 + weight.double().abs().max() / 16 + 2.0**-128
        bounded = bool((error <= bound).all())
        assert bounded


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ALL, ids=str)
def test_nan_and_infinity_become_nan(form: GatherFormat, dtype: torch.dtype, bad: float):
    clean = weight_of(70, 70, dtype)
    weight = clean.clone()
    weight[40, 37] = bad
    shared = torch.zeros(70, 70, dtype=torch.bool)
    height, width = form.block
    shared[40 // height * height :][:height, 37 // width * width :][:, :width] = True
    decoded = round_trip(form, weight)
    assert shard_amax(weight).isposinf()
    if form.needs_amax:
        assert decoded.isnan().all()
    if isinstance(form, NVFP4):  # what shares a block's scale is NaN even if a collective lost it
        amax = amax_of(form, clean)
        decoded = form.decode(form.encode(weight, amax=amax), (70, 70), dtype=dtype, amax=amax)
    if isinstance(form, FP8):
        return
    assert torch.equal(decoded.isnan(), shared)
    assert same_bits(decoded[~shared], round_trip(form, clean)[~shared])


def test_amax_too_small_does_not_pass_silently():
    weight = torch.tensor([[1.0, -3.0, 0.5]])
    amax = torch.tensor(2.0)
    decoded = FP8().decode(FP8().encode(weight, amax=amax), (1, 3), dtype=torch.float32, amax=amax)
    assert decoded.isnan().all()
    form = NVFP4((1, 16))
    decoded = form.decode(form.encode(weight, amax=amax), (1, 3), dtype=torch.float32, amax=amax)
    assert decoded.isnan().all()


@pytest.mark.parametrize("form", ALL, ids=str)
def test_error_bounds(form: GatherFormat):
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(256, 256, generator=generator)
    error = (round_trip(form, weight) - weight).abs()
    height, width = form.block
    if isinstance(form, FP8):
        height, width = weight.shape
    blocks = weight.abs().view(256 // height, height, 256 // width, width)
    largest = blocks.amax((1, 3), keepdim=True).expand_as(blocks).reshape_as(weight)
    # Half of a spacing: relative for normal elements, of the block's smallest for subnormal ones.
    # E4M3's 2^-9 is at most 2^-16 of the largest magnitude, E2M1's 0.5 at most 0.5 / 5.64 of it.
    if isinstance(form, NVFP4):
        bound = torch.maximum(weight.abs() / 5, largest * (0.25 / 5.64))
        saturated = largest * (0.4 / 6.4)
        bound = torch.maximum(bound, saturated)
    else:
        bound = torch.maximum(weight.abs() / 17, largest * 2.0**-17)
    bounded = bool((error <= bound * (1 + 1e-6)).all())
    assert bounded
    relative = float(error.square().sum().sqrt() / weight.square().sum().sqrt())
    assert relative < (0.12 if isinstance(form, NVFP4) else 0.03)
    assert relative > (0.08 if isinstance(form, NVFP4) else 0.02)


@pytest.mark.parametrize("shape", [(128, 128), (2048, 2048), (150, 1000), (4096, 129)])
def test_bytes_of_bf16(shape: tuple[int, int]):
    plain = 2 * shape[0] * shape[1]
    (form,) = gather_formats("bf16")
    assert form.encoded_bytes(shape) == plain
    (form,) = gather_formats("bf16", dtype=torch.float32)
    assert form.encoded_bytes(shape) == 2 * plain
    most = {"fp8": 0.501, "mxfp8": 0.516, "nvfp4": 0.282}
    for name, scale_blocks in itertools.product(most, SCALE_BLOCKS):
        if (name, scale_blocks) == ("fp8", "1d"):
            continue
        for form in gather_formats(name, scale_blocks=scale_blocks):
            blocks = -(-shape[0] // form.block[0]) * -(-shape[1] // form.block[1])
            row = shape[1] if name != "nvfp4" else -(-shape[1] // 2)
            assert form.encoded_bytes(shape) == shape[0] * row + (blocks if name != "fp8" else 0)
            if shape[1] % 32 == 0:
                assert form.encoded_bytes(shape) <= most[name] * plain


def test_planes_of_formats():
    assert gather_formats("mxfp8") == (MXFP8((32, 32)),)
    assert gather_formats("nvfp4") == (NVFP4((16, 16)),)
    forward, backward = gather_formats("mxfp8", scale_blocks="1d")
    weight = weight_of(64, 96, torch.bfloat16)
    assert same_bits(round_trip(backward, weight), round_trip(forward, weight.T.contiguous()).T)
    # Square blocks: the transposed weight has the same values.
    for form in SQUARE:
        assert same_bits(round_trip(form, weight), round_trip(form, weight.T.contiguous()).T)


def test_writing_in_place():
    for form in ALL:
        weight = weight_of(40, 33, torch.bfloat16)
        amax = amax_of(form, weight)
        wire = torch.full((form.encoded_bytes((40, 33)),), 0xA5, dtype=torch.uint8)
        assert form.encode(weight, amax=amax, out=wire) is wire
        out = torch.full_like(weight, torch.nan)
        form.decode(wire, (40, 33), dtype=torch.bfloat16, amax=amax, out=out)
        assert same_bits(out, round_trip(form, weight))


def test_stacked_experts_are_rows():
    experts = weight_of(3 * 64, 48, torch.bfloat16).view(3, 64, 48)
    form = MXFP8()
    apart = torch.stack([round_trip(form, expert) for expert in experts])
    assert same_bits(round_trip(form, experts.view(-1, 48)), apart.view(-1, 48))


def test_what_is_refused():
    weight, amax = torch.ones(4, 4), torch.tensor(1.0)
    for refused in (
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
            refused()
    assert shard_amax(torch.ones(0, 4)) == 0
    assert shard_amax(torch.tensor([[-3.0, 2.0]])) == 3
    assert MXFP8().encode(torch.ones(0, 4)).numel() == 0
