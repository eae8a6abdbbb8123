# SPDX-License-Identifier: Apache-2.0
"""Initial values: a box equals the slice of the full tensor, and values follow their definition."""

import hashlib
import itertools
import math
import statistics

import pytest
import torch

from megatron.core import InitSpec
from megatron.core.initialize import fill_

NORMAL = InitSpec.normal(0.02)
MASK = (1 << 64) - 1


def full_tensor(
    shape, spec=NORMAL, *, seed=7, name="decoder.blocks.0.query.weight", dtype=torch.float32
):
    return fill_(
        torch.full(shape, math.nan, dtype=dtype),
        spec,
        seed=seed,
        name=name,
        shape=shape,
        offsets=(0,) * len(shape),
    )


def defined_bits(seed, name, index):
    """SplitMix64 in Python's integers, straight from its definition."""
    key = int.from_bytes(
        hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest(), "little"
    )
    z = (key + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def quantiles():
    """The table's knots in fp64 from the standard library's inverse normal distribution."""
    inverse = statistics.NormalDist().inv_cdf
    knots = [inverse(i / 4096) for i in range(1, 4096)]
    inner = math.fsum((a * a + a * b + b * b) / 3 for a, b in itertools.pairwise(knots))
    last_knot = knots[-1]  # unit variance: inner + 2/3 (last^2 + last*end + end^2) = 4096
    end = -last_knot / 2 + math.sqrt(
        last_knot * last_knot / 4 - last_knot * last_knot + 1.5 * (4096 - inner)
    )
    return [-end, *knots, end]


def defined_normal(seed, name, index, knots):
    bits = defined_bits(seed, name, index)
    cell, fraction = bits >> 52, (bits >> 33) & ((1 << 19) - 1)
    return knots[cell] + (knots[cell + 1] - knots[cell]) * fraction / (1 << 19)


def test_splitmix_matches_the_published_outputs():
    # First outputs of SplitMix64 seeded with 1234567, as its reference implementation prints them.
    state, outputs = 1234567, []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        outputs.append(z ^ (z >> 31))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_normal_values_match_the_closed_form():
    knots = quantiles()
    actual = (
        full_tensor((300, 41), InitSpec.normal(1.0), seed=-5, name="head.weight").double().flatten()
    )
    expected = [defined_normal(-5, "head.weight", i, knots) for i in range(300 * 41)]
    # Each knot is rounded to 2^-22 and the interpolation floors once: two units are the worst case.
    assert (actual - torch.tensor(expected, dtype=torch.float64)).abs().max() <= 2.0 * 2.0**-22


def test_uniform_values_match_the_closed_form():
    actual = (
        full_tensor((64, 33), InitSpec.uniform(-0.25, 0.5), seed=3, name="dt_bias")
        .double()
        .flatten()
    )
    expected = [
        (defined_bits(3, "dt_bias", i) >> 40) / (1 << 24) * 0.75 - 0.25 for i in range(64 * 33)
    ]
    assert (actual - torch.tensor(expected, dtype=torch.float64)).abs().max() <= 2.0**-25
    assert actual.min() >= -0.25
    assert actual.max() < 0.5


def test_values_match_the_frozen_digest():
    """An old run must be reproducible from its seed: this digest never changes."""
    bits = (
        full_tensor((257, 129), InitSpec.normal(0.02), seed=1234)
        .view(torch.int32)
        .numpy()
        .tobytes()
    )
    assert hashlib.sha256(bits).hexdigest()[:16] == "22e6bdf89f4857c8"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("spec", [NORMAL, InitSpec.uniform(-1.0, 2.0)], ids=["normal", "uniform"])
def test_box_equals_the_slice_of_the_full_tensor(spec, dtype):
    shape = (67, 1021)  # 68,407 elements: three chunks of unequal height
    full = full_tensor(shape, spec, dtype=dtype)
    assert not full.isnan().any()
    for offsets, sizes in [
        ((0, 0), (1, 1)),
        ((66, 1020), (1, 1)),
        ((3, 17), (61, 500)),
        ((0, 1000), (67, 21)),
        ((40, 0), (27, 1021)),
    ]:
        box = fill_(
            torch.full(sizes, math.nan, dtype=dtype),
            spec,
            seed=7,
            name="decoder.blocks.0.query.weight",
            shape=shape,
            offsets=offsets,
        )
        rows, columns = (slice(f, f + s) for f, s in zip(offsets, sizes, strict=True))
        assert torch.equal(box, full[rows, columns])


def test_boxes_of_any_rank_equal_the_slice_of_the_full_tensor():
    for shape, offsets, sizes in [
        ((40_000,), (35_000,), (5_000,)),
        ((3, 5, 7, 11), (1, 2, 0, 3), (2, 3, 7, 5)),
        ((2, 3, 40_000), (1, 1, 1), (1, 2, 39_990)),  # a row longer than one chunk
        ((5, 1, 3), (2, 0, 1), (3, 1, 2)),
    ]:
        full = full_tensor(shape)
        box = fill_(
            torch.full(sizes, math.nan),
            NORMAL,
            seed=7,
            name="decoder.blocks.0.query.weight",
            shape=shape,
            offsets=offsets,
        )
        assert torch.equal(
            box, full[tuple(slice(f, f + s) for f, s in zip(offsets, sizes, strict=True))]
        )
        assert torch.equal(
            full.flatten(), full_tensor((math.prod(shape),))
        )  # only the linear index counts


def test_strided_fill_leaves_neighbours_untouched():
    buffer = torch.full((50, 90), 9.0)
    fill_(buffer[5:45, 10:80:2].t(), NORMAL, seed=7, name="w", shape=(35, 40), offsets=(0, 0))
    assert torch.equal(buffer[5:45, 10:80:2].t(), full_tensor((35, 40), name="w"))
    untouched = int((buffer == 9.0).sum())
    assert untouched == 50 * 90 - 35 * 40


def test_half_precision_values_are_the_rounded_fp32_values():
    full = full_tensor((129, 65))
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(full_tensor((129, 65), dtype=dtype), full.to(dtype))


def test_normal_moments_and_tails_match_the_distribution():
    count = 1 << 21
    values = full_tensor((count // 512, 512), InitSpec.normal(1.0)).double()
    sigma = 1 / math.sqrt(count)  # standard error of the mean; 5 sigma bounds throughout
    assert values.mean().abs() < 5 * sigma
    assert (values.pow(2).mean() - 1).abs() < 5 * sigma * math.sqrt(2)
    assert (values.pow(3).mean()).abs() < 5 * sigma * math.sqrt(15)
    assert (values.pow(4).mean() - 3).abs() < 5 * sigma * math.sqrt(96)
    assert 3.9 < values.abs().max() < 3.966
    for z in (-2.5, -1.0, 0.0, 0.7, 3.0):
        share = statistics.NormalDist().cdf(z)
        below = float((values < z).double().mean())
        assert abs(below - share) < 5 * sigma * math.sqrt(share * (1 - share))


def test_no_correlation_between_names_seeds_rows_and_columns():
    count = 1 << 18
    reference = full_tensor((512, 512), InitSpec.normal(1.0)).double()
    variants = [
        full_tensor(
            (512, 512), InitSpec.normal(1.0), name="decoder.blocks.1.query.weight"
        ).double(),
        full_tensor((512, 512), InitSpec.normal(1.0), seed=8).double(),
        full_tensor((512, 512), InitSpec.normal(1.0), seed=7 + (1 << 32)).double(),
        reference.roll(1, 0),
        reference.roll(1, 1),
        reference.t(),
    ]
    for variant in variants:
        assert ((reference * variant).mean()).abs() < 5 / math.sqrt(count)


def test_constant_scalar_and_empty_tensors_are_filled():
    assert torch.equal(full_tensor((3, 4), InitSpec.constant(1.5)), torch.full((3, 4), 1.5))
    scalar = full_tensor(())
    assert scalar.item() == full_tensor((1,)).item() != 0.0
    assert full_tensor((0, 5)).shape == (0, 5)


@pytest.mark.parametrize(
    ("out", "shape", "offsets"),
    [
        (torch.empty(3, 4), (3, 4), (1, 0)),
        (torch.empty(3, 4), (3, 4), (0, -1)),
        (torch.empty(3, 4), (12,), (0,)),
        (torch.empty(3, 4), (3, 4), (0,)),
    ],
)
def test_boxes_outside_the_tensor_are_refused(out, shape, offsets):
    with pytest.raises(ValueError, match=r"q\.weight.*\(3, 4\)"):
        fill_(out, NORMAL, seed=1, name="q.weight", shape=shape, offsets=offsets)


def test_invalid_specs_are_refused():
    with pytest.raises(ValueError, match="std is -1"):
        InitSpec.normal(-1.0)
    with pytest.raises(ValueError, match=r"\[2.0, 2.0\)"):
        InitSpec.uniform(2.0, 2.0)
    with pytest.raises(ValueError, match="int64"):
        fill_(torch.empty(2, dtype=torch.int64), NORMAL, seed=1, name="w", shape=(2,), offsets=(0,))
    with pytest.raises(ValueError, match="'zipf'"):
        InitSpec("zipf")


def test_decay_rates_are_logs_of_uniform_values() -> None:
    spec = InitSpec.log_of_uniform(1.0, 16.0)
    plain = fill_(
        torch.empty(5000, dtype=torch.float64),
        InitSpec.uniform(1.0, 16.0),
        seed=1,
        name="A",
        shape=(5000,),
        offsets=(0,),
    )
    drawn = fill_(torch.empty(5000), spec, seed=1, name="A", shape=(5000,), offsets=(0,))
    assert torch.equal(drawn, plain.log().float())
    tail = fill_(torch.empty(7), spec, seed=1, name="A", shape=(5000,), offsets=(4990,))
    assert torch.equal(tail, drawn[4990:4997])


def test_softplus_of_step_bias_is_log_uniform() -> None:
    spec = InitSpec.step_bias(1e-3, 0.1)
    drawn = fill_(torch.empty(20_000), spec, seed=1, name="dt", shape=(20_000,), offsets=(0,))
    steps = torch.nn.functional.softplus(drawn.double())
    assert float(steps.min()) >= 1e-3 * (1 - 1e-4)
    assert float(steps.max()) <= 0.1 * (1 + 1e-4)
    thirds = [(steps < bound).double().mean().item() for bound in (10 ** (-7 / 3), 10 ** (-5 / 3))]
    assert thirds == pytest.approx([1 / 3, 2 / 3], abs=0.02)


@pytest.mark.parametrize("make", [InitSpec.log_of_uniform, InitSpec.step_bias])
def test_init_range_must_be_positive(make) -> None:
    with pytest.raises(ValueError, match="finite low < high"):
        make(0.0, 1.0)
