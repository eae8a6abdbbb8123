# SPDX-License-Identifier: Apache-2.0
"""Latent attention against DeepSeek-V3's in transformers in fp64, and refused configurations."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from megatron.core.context_parallel import SequenceLayout
from megatron.core.distributed import DataParallel
from megatron.core.ops.rope import RopeScaling
from megatron.core.transformer import (
    LatentAttention,
    LatentAttentionConfig,
    NormConfig,
    RopeConfig,
    RotaryEmbedding,
)
from tests.support.closeness import assert_all_close
from tests.support.inputs import generator, one_thread, perturbed
from tests.support.layers import make_layer_build
from tests.support.nan_memory import nan_memory
from tests.unit_tests.core.transformer.test_layers import logical_tensors

S, B, H, BASE = 19, 2, 26, 300.0

PLAIN = LatentAttentionConfig(
    num_attention_heads=3,
    q_lora_rank=14,
    kv_lora_rank=11,
    nope_channels=5,
    rope_channels=6,
    value_channels=7,
    norm_epsilon=1e-6,
)
DIRECT = dataclasses.replace(PLAIN, q_lora_rank=None)
LARGE_VALUES = dataclasses.replace(PLAIN, value_channels=13)
EQUAL = dataclasses.replace(PLAIN, value_channels=PLAIN.query_channels)
YARN = {"factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 4.0, "beta_slow": 1.0}


def mscale(factor: float, weight: float) -> float:
    """Return the scale of attention for a context that is `factor` times longer (DeepSeek-V2)."""
    return 0.1 * weight * math.log(factor) + 1.0


#: name -> (configuration, interleaved RoPE, yarn, several documents per row)
CASES = {
    "low rank, neighbours": (PLAIN, True, False, False),
    "low rank, halves, documents": (PLAIN, False, False, True),
    "direct, neighbours, documents": (DIRECT, True, False, True),
    "direct, halves, yarn": (DIRECT, False, True, False),
    "low rank, neighbours, yarn": (PLAIN, True, True, False),
    "large values": (LARGE_VALUES, True, False, False),
    "equal sizes": (EQUAL, True, False, False),
}


def hf_layer(config: LatentAttentionConfig, interleaved: bool, yarn: bool):
    """Return the layer of transformers in fp64 with perturbed weights, and its rotary embedding."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

    rope = {"rope_type": "default", "rope_theta": BASE}
    if yarn:
        rope |= {"rope_type": "yarn", "original_max_position_embeddings": 16, **YARN}
    hf_config = DeepseekV3Config(
        hidden_size=H,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_attention_heads,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.nope_channels,
        qk_rope_head_dim=config.rope_channels,
        v_head_dim=config.value_channels,
        rope_interleave=interleaved,
        rope_parameters=rope,
        max_position_embeddings=128,
    )
    hf_config._attn_implementation = "eager"
    layer = modeling.DeepseekV3Attention(hf_config, 0).double().eval()
    perturbed_weights = perturbed(dict(layer.named_parameters()), seed=1, scale=0.3)
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            weight.copy_(perturbed_weights[name].float())
    return layer, modeling.DeepseekV3RotaryEmbedding(hf_config)


def to_mcore_names(tensors: dict[str, torch.Tensor], config: LatentAttentionConfig):
    """Return transformers' weights or gradients under this project's names."""
    renamed = {"output.weight": tensors["o_proj.weight"]}
    if config.q_lora_rank is None:
        renamed["query.weight"] = tensors["q_proj.weight"]
    else:
        renamed["query_down.weight"] = tensors["q_a_proj.weight"]
        renamed["query_norm.weight"] = tensors["q_a_layernorm.weight"]
        renamed["query_up.weight"] = tensors["q_b_proj.weight"]
    down = tensors["kv_a_proj_with_mqa.weight"]  # latent, then rotating features
    renamed["kv_down.weight"] = down[: config.kv_lora_rank]
    renamed["key_rope.weight"] = down[config.kv_lora_rank :]
    renamed["kv_norm.weight"] = tensors["kv_a_layernorm.weight"]
    up = tensors["kv_b_proj.weight"].unflatten(0, (config.num_attention_heads, -1))
    renamed["key_up.weight"] = up[:, : config.nope_channels].flatten(0, 1)  # head by head
    renamed["value_up.weight"] = up[:, config.nope_channels :].flatten(0, 1)
    return {f"a.{name}": tensor for name, tensor in renamed.items()}


def document_rows(packed: bool) -> dict[str, torch.Tensor]:
    """Return positions [s, b] and document ids [s, b]; a row has several documents if `packed`."""
    ids = torch.zeros(S, B, dtype=torch.int64)
    if packed:
        ids[7:, 0] += 1
        ids[11:, 0] += 1
        ids[2:, 1] += 1
    positions = torch.arange(S)[:, None].expand(S, B)
    starts = [[int((ids[:, b] < ids[s, b]).sum()) for b in range(B)] for s in range(S)]
    return {"positions": positions - torch.tensor(starts), "document_ids": ids}


@pytest.mark.parametrize("case", CASES)
def test_latent_attention_matches_transformers(case: str):
    pytest.importorskip("transformers")
    config, interleaved, yarn, packed = CASES[case]
    rope = RopeConfig(base=BASE, interleaved=interleaved)
    if yarn:
        mscales = [mscale(YARN["factor"], YARN[name]) for name in ("mscale", "mscale_all_dim")]
        config = dataclasses.replace(config, scale_factor=mscales[1] ** 2)
        scaling = RopeScaling(
            kind="yarn",
            factor=YARN["factor"],
            beta_fast=YARN["beta_fast"],
            beta_slow=YARN["beta_slow"],
            original_max_position=16,
            attention_factor=mscales[0] / mscales[1],
        )
        rope = dataclasses.replace(rope, scaling=scaling)
    rows = document_rows(packed)
    layout = SequenceLayout(rows["positions"], rows["document_ids"] if packed else None)
    hidden = torch.randn(S, B, H, generator=generator(4))
    factors = torch.randn(S, B, H, generator=generator(5))
    with one_thread():
        layer, table = hf_layer(config, interleaved, yarn)
        x = hidden.double().transpose(0, 1).requires_grad_(True)  # [b, s, h]
        ids = rows["document_ids"].t()
        visible = torch.ones(S, S).tril().bool() & (ids[:, :, None] == ids[:, None])  # [b, s, s]
        mask = torch.zeros(B, 1, S, S, dtype=torch.float64).masked_fill(
            ~visible[:, None], -math.inf
        )
        positions = table(x, rows["positions"].t())
        expected = layer(x, position_embeddings=positions, attention_mask=mask)[0].transpose(0, 1)
        (expected * factors).sum().backward()

        build = make_layer_build(H)
        attention = LatentAttention(
            "a", 3, config=config, norm=NormConfig(epsilon=0.5), build=build
        )
        build.store.materialize()
        weights = logical_tensors(build.store, lambda handle: handle.get())
        hf_weights = to_mcore_names(dict(layer.named_parameters()), config)
        assert weights.keys() == hf_weights.keys()
        for name, weight in hf_weights.items():
            weights[name].copy_(weight.detach())
        engine = DataParallel(build.store, build.store.groups)
        y = hidden.clone().requires_grad_(True)
        engine.begin_step()
        with nan_memory():
            output = attention(
                y, layout, rope=RotaryEmbedding(rope, config.rope_features)(layout.positions)
            )
            engine.backward((output * factors).sum(), last=True)
            engine.finish()
    grads = {name: weight.grad for name, weight in layer.named_parameters()}
    actual = {"output": output.detach(), "input gradient": y.grad}
    reference = {"output": expected.detach(), "input gradient": x.grad.transpose(0, 1)}
    actual |= logical_tensors(build.store, lambda handle: handle.main_grad)
    assert_all_close(actual, reference | to_mcore_names(grads, config), bound=5e-6)


def test_weight_shapes_match_the_paper():
    build = make_layer_build(H)
    LatentAttention("a", 0, config=PLAIN, norm=NormConfig(), build=build)
    handles = build.store.handles.values()
    shapes = {
        sub_weight.name[2:]: sub_weight.shape
        for h in handles
        for sub_weight in h.sharding.sub_weights
    }
    assert shapes == {
        "query_down.weight": (14, H),
        "query_norm.weight": (14,),
        "query_up.weight": (3 * (5 + 6), 14),
        "kv_down.weight": (11, H),
        "key_rope.weight": (6, H),
        "kv_norm.weight": (11,),
        "key_up.weight": (3 * 5, 11),
        "value_up.weight": (3 * 7, 11),
        "output.weight": (H, 3 * 7),
    }
    direct = make_layer_build(H)
    LatentAttention("a", 0, config=DIRECT, norm=NormConfig(), build=direct)
    assert direct.store.handles["a.query.weight"].shape == (3 * (5 + 6), H)
    assert not any("query_down" in name for name in direct.store.handles)


def test_invalid_latent_config_is_refused():
    def problems(tp: int = 1, cp: int = 1, engine: str = "auto", **changes) -> list[str]:
        return dataclasses.replace(PLAIN, **changes).problems(tp, cp=cp, engine=engine)

    assert problems(tp=3) == []
    assert "3 must be divisible by tensor-model-parallel-size 2" in problems(tp=2)[0]
    assert "use >= 1" in problems(kv_lora_rank=0)[0]
    assert problems(dropout=1.0) == ["attention-dropout 1.0 must be in [0, 1)"]
    assert problems(scale_factor=0.0) == ["softmax scale factor 0.0 must be positive"]
    assert problems(norm_epsilon=0.0) == ["norm epsilon is 0.0: use a positive number"]
    expected = "engine a2a: 3 query heads do not divide over 2 context parallel ranks: use p2p"
    assert expected in problems(cp=2, engine="a2a")[0]
    assert problems(cp=2, engine="p2p") == problems(cp=3, engine="a2a") == []
    assert "use auto, p2p" in problems(cp=2, engine="ring")[0]
    invalid = dataclasses.replace(PLAIN, num_attention_heads=0)
    with pytest.raises(ValueError, match="use >= 1"):
        LatentAttention("a", 0, config=invalid, norm=NormConfig(), build=make_layer_build(H))
