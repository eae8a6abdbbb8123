# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings against their equation, and their tables against transformers' Llama."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron.core.ops.rope import (
    RopeScaling,
    RopeTable,
    apply_rope,
    naive,
    rotary_table,
    split_heads,
)
from tests.support.closeness import assert_close_by_metric
from tests.support.gpu_agreement import (
    BOUND,
    DTYPES,
    agree,
    assert_refused,
    random_tensor,
    sized,
    use_launches,
)
from tests.support.launch_kernels import assert_launches

KERNELS = pytest.mark.gpu
SEQUENCE, BATCH = sized((1021, 3), (7, 2))
QUERIES, KEYS, FEATURES = sized((16, 2, 128), (3, 1, 20))


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    """Use programs that rotate few tokens."""
    use_launches(monkeypatch, "rope", ("ROTATE",), TILE=128)


def table_and_angles(device, rotated, per_sample):
    """Return (cos, sin) and the angles of the equation, [s, 1 or b, 1, rotated / 2]."""
    positions = torch.arange(SEQUENCE, device=device) + 3
    if per_sample:
        positions = torch.stack([positions * (i + 1) for i in range(BATCH)], -1)
    frequencies = 10000.0 ** (-torch.arange(0, rotated, 2, device=device) / max(rotated, 1))
    angles = positions[..., None].double() * frequencies
    table = rotary_table(positions, dim=rotated) if rotated else None
    return table, angles[:, :, None] if per_sample else angles[:, None, None]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("features", "rotated"), sized([(128, 128), (128, 32)], [(6, 6), (10, 4)]))
@pytest.mark.parametrize("per_sample", [False, True])
def test_rope_matches_complex_multiplication(backend, interleaved, features, rotated, per_sample):
    (cos, sin), angles = table_and_angles(backend.device, rotated, per_sample)
    backend.agree(
        partial(apply_rope, cos=cos, sin=sin, interleaved=interleaved),
        lambda x: naive.apply_rope(x, angles, interleaved),
        backend.random((SEQUENCE, BATCH, QUERIES, features)),
        bounds={**backend.bounds, torch.float64: 1e-5},  # the table is fp32
    )


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("features", "rotated"), [(6, 6), (10, 4)])
def test_rotation_in_place_matches_the_equation(dtype, interleaved, features, rotated):
    (cos, sin), angles = table_and_angles("cpu", rotated, per_sample=False)
    heads = random_tensor("cpu", SEQUENCE, QUERIES + KEYS, features).to(dtype)[:, :QUERIES]
    expected = naive.apply_rope(heads.double().unsqueeze(1), angles, interleaved).squeeze(1)
    RopeTable(cos, sin, interleaved).rotate_(heads)
    bound = 1e-5 if dtype is torch.float64 else BOUND[dtype]  # the table is fp32
    assert_close_by_metric("heads", heads, expected, bound=bound)


@pytest.mark.parametrize(
    ("features", "rotated", "gates"),
    sized([(128, 128, 0), (128, 64, 16)], [(6, 6, 0), (10, 4, 4), (6, 0, 4), (6, 0, 0)]),
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_split_heads_matches_the_equation(backend, interleaved, features, rotated, gates):
    sizes = [4, 2, 2] + [gates] * bool(gates)
    table, angles = table_and_angles(backend.device, rotated, per_sample=True)
    rotation = RopeTable(*table, interleaved) if rotated else None

    def equation(x):
        query, key, *unrotated = x.split(sizes, dim=2)
        if rotated:
            query, key = (naive.apply_rope(z, angles, interleaved) for z in (query, key))
        return query, key, *unrotated

    backend.agree(
        lambda x, **options: tuple(split_heads(x, sizes, rotation, **options)),
        equation,
        backend.random((SEQUENCE, BATCH, sum(sizes), features)),
        bounds={**backend.bounds, torch.float64: 1e-5},
    )


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [KEYS, QUERIES])
def test_heads_of_a_projection_are_rotated_by_one_kernel(device, dtype, heads):
    (cos, sin), _ = table_and_angles(device, FEATURES // 4 // 2 * 2, per_sample=True)
    rotate = partial(apply_rope, cos=cos, sin=sin, interleaved=True)
    x = random_tensor(device, SEQUENCE, BATCH, heads + 3, FEATURES)
    agree(lambda x, **options: rotate(x[:, :, 1:-2], **options), (x,), dtype)
    x = x.to(dtype)[:, :, 1:-2]
    assert_launches(lambda: rotate(x, implementation="triton"), {"rope_kernel": 1})


@KERNELS
@pytest.mark.parametrize("gates", [0, QUERIES])
def test_heads_of_a_projection_share_one_gradient(device, gates):
    sizes = [QUERIES, KEYS, KEYS] + [gates] * bool(gates)
    (cos, sin), _ = table_and_angles(device, FEATURES, per_sample=False)
    split = partial(split_heads, sizes=sizes, rotation=RopeTable(cos, sin))
    x = random_tensor(device, SEQUENCE, BATCH, sum(sizes), FEATURES)
    x = x.to(DTYPES[-1]).requires_grad_()
    grad_outputs = [torch.ones_like(heads) for heads in split(x.detach())]
    assert_launches(
        lambda: torch.autograd.grad(split(x, implementation="triton"), x, grad_outputs),
        {"rope_kernel": 1, "join_heads_kernel": 1},
    )


@KERNELS
def test_offsets_beyond_32_bits_match_the_reference(device):
    """The last rows of a tensor beyond 2^31 elements equal the rows computed separately."""
    rows, heads = sized(((1 << 20) + 11, 256), (11, 5))
    x = torch.ones(rows, 1, heads, 8, dtype=DTYPES[-1], device=device)
    x[-5:] = random_tensor(device, 5, 1, heads, 8).to(x.dtype)
    cos, sin = rotary_table(torch.arange(rows, device=device), dim=8)
    actual = apply_rope(x, cos, sin, implementation="triton")[-5:]
    expected = apply_rope(x[-5:].double(), cos[-5:], sin[-5:], implementation="reference")
    assert_close_by_metric("rope", actual, expected, bound=BOUND[x.dtype])


ORIGINAL = 64
SCALINGS = {
    "default": (None, {}),
    "linear": (RopeScaling(kind="linear", factor=4.0), {"factor": 4.0}),
    "llama3": (
        RopeScaling(
            kind="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position=ORIGINAL,
        ),
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        },
    ),
    "yarn": (
        RopeScaling(kind="yarn", factor=8.0, original_max_position=ORIGINAL),
        {"factor": 8.0, "original_max_position_embeddings": ORIGINAL},
    ),
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_rope_matches_llama(kind):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config_type = pytest.importorskip("transformers").LlamaConfig
    scaling, parameters = SCALINGS[kind]
    config = config_type(
        hidden_size=96,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_parameters={"rope_type": kind, "rope_theta": 500.0, **parameters},
    )
    torch.manual_seed(3)
    x = torch.randn(37, 2, 4, 24)  # [s, b, n, d]
    positions = torch.arange(37) + 5
    hf_rope = llama.LlamaRotaryEmbedding(config)
    hf_cos, hf_sin = hf_rope(x, positions[None])
    expected, _ = llama.apply_rotary_pos_emb(
        x.permute(1, 2, 0, 3), x.permute(1, 2, 0, 3), hf_cos, hf_sin
    )
    cos, sin = rotary_table(positions, dim=24, base=500.0, scaling=scaling)
    torch.testing.assert_close(cos, hf_cos[0, :, :12], rtol=0, atol=2e-6)
    actual = apply_rope(x, cos, sin).permute(1, 2, 0, 3)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    if scaling is not None:  # assert that the scaling was active
        plain, _ = rotary_table(positions, dim=24, base=500.0)
        assert (plain - cos).abs().max() > 1e-2


X, TABLE = torch.ones(5, 2, 4, 6), torch.ones(5, 3)
BAD = {
    "odd table": (lambda: rotary_table(torch.arange(3), dim=5), "dim=5 must be positive and even"),
    "wide table": (lambda: apply_rope(X, torch.ones(5, 4), torch.ones(5, 4)), "8 features"),
    "table length": (lambda: apply_rope(X[:4], TABLE, TABLE), r"cos \(5, 3\)"),
    "every problem": (
        lambda: RopeScaling(kind="ntk", factor=0.5, beta_slow=40),
        r"kind='ntk'.*factor=0\.5.*beta_slow=40",
    ),
    "original position": (
        lambda: RopeScaling(kind="llama3", factor=8.0),
        "original_max_position is required by kind='llama3'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_one_line_errors(name):
    assert_refused(*BAD[name])
