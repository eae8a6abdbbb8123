# SPDX-License-Identifier: Apache-2.0
"""Rotary tables and rotation against transformers' Llama: plain, linear, Llama 3 and YaRN."""

import pytest
import torch

from megatron.core.ops.rope import RopeScaling, apply_rope, rotary_table

ORIGINAL = 64
CASES = {
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


@pytest.mark.parametrize("kind", CASES)
def test_rope_matches_llama(kind):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config_type = pytest.importorskip("transformers").LlamaConfig
    scaling, parameters = CASES[kind]
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


def test_scaling_reports_every_problem_at_once():
    with pytest.raises(ValueError, match=r"kind='ntk'.*factor=0\.5.*beta_slow=40"):
        RopeScaling(kind="ntk", factor=0.5, beta_slow=40)
    with pytest.raises(ValueError, match="original_max_position is required by kind='llama3'"):
        RopeScaling(kind="llama3", factor=8.0)
