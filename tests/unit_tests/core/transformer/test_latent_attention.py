# SPDX-License-Identifier: Apache-2.0
"""Latent attention against DeepSeek-V3's in transformers in fp64, and what is refused."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from megatron.core.backend import LOCAL
from megatron.core.context_parallel import SequenceLayout
from megatron.core.distributed import DataParallel
from megatron.core.initialize import InitSpec
from megatron.core.ops.rope import RopeScaling
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.tensor_parallel import TensorParallelRegion
from megatron.core.transformer import (
    LatentAttention,
    LatentAttentionConfig,
    LayerBuild,
    NormConfig,
    RopeConfig,
    RotaryEmbedding,
)
from megatron.core.weight_gather import WeightStore
from tests.support.closeness import assert_all_close
from tests.support.inputs import generator, one_thread, perturbed
from tests.support.nan_memory import nan_memory

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
WIDE_VALUES = dataclasses.replace(PLAIN, value_channels=13)
EQUAL = dataclasses.replace(PLAIN, value_channels=PLAIN.query_channels)
YARN = {"factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 4.0, "beta_slow": 1.0}


def mscale(factor: float, weight: float) -> float:
    """Return the scale of attention for a context that is `factor` times longer (DeepSeek-V2)."""
    return 0.1 * weight * math.log(factor) + 1.0


#: name: (our configuration, whether neighbours are pairs, yarn, whether rows have documents)
CASES = {
    "low rank, neighbours": (PLAIN, True, False, False),
    "low rank, halves, documents": (PLAIN, False, False, True),
    "direct, neighbours, documents": (DIRECT, True, False, True),
    "direct, halves, yarn": (DIRECT, False, True, False),
    "low rank, neighbours, yarn": (PLAIN, True, True, False),
    "wide values": (WIDE_VALUES, True, False, False),
    "equal sizes": (EQUAL, True, False, False),
}


def surroundings() -> LayerBuild:
    """Return a build in a single process with a fresh store."""
    groups = ProcessGroupCollection.single()
    return LayerBuild(
        store=WeightStore(groups, seed=1),
        region=TensorParallelRegion(groups["tp"]),
        backend=LOCAL,
        hidden_size=H,
        init=InitSpec.normal(0.4),
        output_init=InitSpec.normal(0.3),
    )


def their_layer(config: LatentAttentionConfig, interleaved: bool, yarn: bool):
    """Return the layer of transformers in fp64, its weights moved, and its table of positions."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    rope = {"rope_type": "default", "rope_theta": BASE}
    if yarn:
        rope |= {"rope_type": "yarn", "original_max_position_embeddings": 16, **YARN}
    made = DeepseekV3Config(
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
    made._attn_implementation = "eager"
    layer = theirs.DeepseekV3Attention(made, 0).double().eval()
    moved = perturbed(dict(layer.named_parameters()), seed=1, scale=0.3)
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            weight.copy_(moved[name].float())
    return layer, theirs.DeepseekV3RotaryEmbedding(made)


def our_weights(tensors: dict[str, torch.Tensor], config: LatentAttentionConfig):
    """Return their tensors, weights or gradients, by our names."""
    found = {"output.weight": tensors["o_proj.weight"]}
    if config.q_lora_rank is None:
        found["query.weight"] = tensors["q_proj.weight"]
    else:
        found["query_down.weight"] = tensors["q_a_proj.weight"]
        found["query_norm.weight"] = tensors["q_a_layernorm.weight"]
        found["query_up.weight"] = tensors["q_b_proj.weight"]
    down = tensors["kv_a_proj_with_mqa.weight"]  # latent, then rotating features
    found["kv_down.weight"] = down[: config.kv_lora_rank]
    found["key_rope.weight"] = down[config.kv_lora_rank :]
    found["kv_norm.weight"] = tensors["kv_a_layernorm.weight"]
    up = tensors["kv_b_proj.weight"].unflatten(0, (config.num_attention_heads, -1))
    found["key_up.weight"] = up[:, : config.nope_channels].flatten(0, 1)  # head by head
    found["value_up.weight"] = up[:, config.nope_channels :].flatten(0, 1)
    return {f"a.{name}": tensor for name, tensor in found.items()}


def pieces(store: WeightStore, flat_of) -> dict[str, torch.Tensor]:
    """Return views of whole logical tensors in each handle's storage."""
    found = {}
    for handle in store.handles.values():
        flat = flat_of(handle).view(-1)
        for box in store.boxes(handle):
            found[box.name] = flat[box.start : box.start + box.numel].view(box.sizes)
    return found


def documents(wanted: bool) -> dict[str, torch.Tensor]:
    """Return positions [s, b] and document ids [s, b] of rows with several documents, or of one."""
    ids = torch.zeros(S, B, dtype=torch.int64)
    if wanted:
        ids[7:, 0] += 1
        ids[11:, 0] += 1
        ids[2:, 1] += 1
    places = torch.arange(S)[:, None].expand(S, B)
    starts = [[int((ids[:, b] < ids[s, b]).sum()) for b in range(B)] for s in range(S)]
    return {"positions": places - torch.tensor(starts), "document_ids": ids}


@pytest.mark.parametrize("case", CASES)
def test_output_and_every_gradient(case: str):
    pytest.importorskip("transformers")
    config, interleaved, yarn, packed = CASES[case]
    rope = RopeConfig(base=BASE, interleaved=interleaved)
    if yarn:
        shares = [mscale(YARN["factor"], YARN[name]) for name in ("mscale", "mscale_all_dim")]
        config = dataclasses.replace(config, scale_factor=shares[1] ** 2)
        scaling = RopeScaling(
            kind="yarn",
            factor=YARN["factor"],
            beta_fast=YARN["beta_fast"],
            beta_slow=YARN["beta_slow"],
            original_max_position=16,
            attention_factor=shares[0] / shares[1],
        )
        rope = dataclasses.replace(rope, scaling=scaling)
    rows = documents(packed)
    layout = SequenceLayout(rows["positions"], rows["document_ids"] if packed else None)
    hidden = torch.randn(S, B, H, generator=generator(4))
    factors = torch.randn(S, B, H, generator=generator(5))
    with one_thread():
        layer, table = their_layer(config, interleaved, yarn)
        x = hidden.double().transpose(0, 1).requires_grad_(True)  # [b, s, h]
        ids = rows["document_ids"].t()
        seen = torch.ones(S, S).tril().bool() & (ids[:, :, None] == ids[:, None])  # [b, s, s]
        mask = torch.zeros(B, 1, S, S, dtype=torch.float64).masked_fill(~seen[:, None], -math.inf)
        positions = table(x, rows["positions"].t())
        wanted = layer(x, position_embeddings=positions, attention_mask=mask)[0].transpose(0, 1)
        (wanted * factors).sum().backward()

        build = surroundings()
        ours = LatentAttention("a", 3, config=config, norm=NormConfig(epsilon=0.5), build=build)
        build.store.materialize()
        weights = pieces(build.store, lambda handle: handle.get())
        theirs = our_weights(dict(layer.named_parameters()), config)
        assert weights.keys() == theirs.keys()
        for name, weight in theirs.items():
            weights[name].copy_(weight.detach())
        engine = DataParallel(build.store, build.store.groups)
        y = hidden.clone().requires_grad_(True)
        engine.begin_step()
        with nan_memory():
            got = ours(
                y, layout, rope=RotaryEmbedding(rope, config.rope_features)(layout.positions)
            )
            engine.backward((got * factors).sum(), last=True)
            engine.finish()
    grads = {name: weight.grad for name, weight in layer.named_parameters()}
    found = {"output": got.detach(), "input gradient": y.grad}
    reference = {"output": wanted.detach(), "input gradient": x.grad.transpose(0, 1)}
    found |= pieces(build.store, lambda handle: handle.main_grad)
    assert_all_close(found, reference | our_weights(grads, config), bound=5e-6)


def test_weights_have_the_shapes_of_the_paper():
    build = surroundings()
    LatentAttention("a", 0, config=PLAIN, norm=NormConfig(), build=build)
    handles = build.store.handles.values()
    shapes = {part.name[2:]: part.shape for h in handles for part in h.sharding.sub_weights}
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
    direct = surroundings()
    LatentAttention("a", 0, config=DIRECT, norm=NormConfig(), build=direct)
    assert direct.store.handles["a.query.weight"].shape == (3 * (5 + 6), H)
    assert not any("query_down" in name for name in direct.store.handles)


def test_what_cannot_be_says_why():
    def problems(tp: int = 1, cp: int = 1, engine: str = "auto", **changes) -> list[str]:
        return dataclasses.replace(PLAIN, **changes).problems(tp, cp=cp, engine=engine)

    assert problems(tp=3) == []
    assert "3 must be divisible by tensor-model-parallel-size 2" in problems(tp=2)[0]
    assert "use >= 1" in problems(kv_lora_rank=0)[0]
    assert problems(dropout=1.0) == ["attention-dropout 1.0 must be in [0, 1)"]
    assert problems(scale_factor=0.0) == ["softmax scale factor 0.0 must be positive"]
    assert problems(norm_epsilon=0.0) == ["norm epsilon is 0.0: use a positive number"]
    wanted = "engine a2a: 3 query heads do not divide over 2 context parallel ranks: use p2p"
    assert wanted in problems(cp=2, engine="a2a")[0]
    assert problems(cp=2, engine="p2p") == problems(cp=3, engine="a2a") == []
    assert "use auto, p2p" in problems(cp=2, engine="ring")[0]
    odd = dataclasses.replace(PLAIN, num_attention_heads=0)
    with pytest.raises(ValueError, match="use >= 1"):
        LatentAttention("a", 0, config=odd, norm=NormConfig(), build=surroundings())
