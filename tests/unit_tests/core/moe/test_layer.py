# SPDX-License-Identifier: Apache-2.0
"""Whole mixtures in a single process, against transformers in fp64 and a loop over tokens."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F

from megatron.core import ProcessGroupCollection
from megatron.core.moe import MoE, MoEConfig, RouterConfig
from tests.support.closeness import assert_all_close
from tests.support.inputs import generator, one_thread, perturbed
from tests.support.nan_memory import nan_memory
from tests.unit_tests.core.moe.single_layer import Layer, make_layer_build, merged

S, B, H, FFN, SHARED = 13, 3, 18, 11, 7
SIGMOID = RouterConfig(
    topk=3,
    score_function="sigmoid",
    scaling_factor=2.5,
    num_groups=3,
    group_topk=2,
    expert_bias=True,
)
#: Model family of transformers -> configuration of the same block.
CASES = {
    "mixtral": MoEConfig(num_experts=5, ffn_hidden_size=FFN, router=RouterConfig(topk=2)),
    "deepseek": MoEConfig(
        num_experts=9, ffn_hidden_size=FFN, router=SIGMOID, shared_ffn_hidden_size=2 * FFN
    ),
    "qwen": MoEConfig(
        num_experts=6,
        ffn_hidden_size=FFN,
        router=RouterConfig(topk=4, normalize=False),
        shared_ffn_hidden_size=SHARED,
        shared_gate=True,
    ),
    "gpt_oss": MoEConfig(
        num_experts=5,
        ffn_hidden_size=FFN,
        router=RouterConfig(topk=2, bias=True),
        activation="quick_gelu",
        clamp=0.8,
        linear_offset=1.0,
        bias=True,
    ),
}


def hf_layer(name: str, config: MoEConfig) -> torch.nn.Module:
    """Return the block of transformers in fp64, with all weights perturbed."""
    sizes = {"hidden_size": H, "num_experts_per_tok": config.router.topk}
    if name == "mixtral":
        from transformers import MixtralConfig as Config
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock as Block

        sizes |= {"num_local_experts": config.num_experts, "intermediate_size": FFN}
    elif name == "gpt_oss":
        from transformers import GptOssConfig as Config
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP as Block

        sizes |= {"num_local_experts": config.num_experts, "intermediate_size": FFN}
        sizes |= {"swiglu_limit": config.clamp}
    elif name == "qwen":
        from transformers import Qwen2MoeConfig as Config
        from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock as Block

        sizes |= {
            "num_experts": config.num_experts,
            "moe_intermediate_size": FFN,
            "shared_expert_intermediate_size": SHARED,
            "norm_topk_prob": False,
        }
    else:
        from transformers import DeepseekV3Config as Config
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE as Block

        sizes |= {
            "n_routed_experts": config.num_experts,
            "moe_intermediate_size": FFN,
            "n_shared_experts": 2,
            "n_group": config.router.num_groups,
            "topk_group": config.router.group_topk,
            "norm_topk_prob": True,
            "routed_scaling_factor": config.router.scaling_factor,
        }
    hf_config = Config(**sizes)
    hf_config._experts_implementation = "eager"
    layer = Block(hf_config).double()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.zero_()
        for key, value in perturbed(dict(layer.named_parameters()), seed=1, scale=0.4).items():
            layer.get_parameter(key).copy_(value.float())
    if name == "deepseek":
        bias = 0.3 * torch.rand(config.num_experts, generator=generator(1))
        layer.gate.e_score_correction_bias.copy_(bias)
    return layer


def to_mcore_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return transformers' weights or gradients under this project's names."""
    fused = tensors["experts.gate_up_proj"]
    if "experts.gate_up_proj_bias" in tensors:
        return _gpt_oss_names(tensors)
    gate, up = fused.chunk(2, dim=1)  # [E, f, h]
    renamed = {
        "m.router.weight": tensors["gate.weight"],
        "m.experts.gate.weight": gate,
        "m.experts.up.weight": up,
        "m.experts.down.weight": tensors["experts.down_proj"],
    }
    for projection in ("gate", "up", "down"):
        for shared in ("shared_expert", "shared_experts"):
            if f"{shared}.{projection}_proj.weight" in tensors:
                renamed[f"m.shared.{projection}.weight"] = tensors[
                    f"{shared}.{projection}_proj.weight"
                ]
    if "shared_expert_gate.weight" in tensors:
        renamed["m.shared_gate.weight"] = tensors["shared_expert_gate.weight"]
    return renamed


def _gpt_oss_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return gpt-oss's tensors: matrices are transposed, and gate and up alternate."""
    fused, biases = tensors["experts.gate_up_proj"].mT, tensors["experts.gate_up_proj_bias"]
    return {
        "m.router.weight": tensors["router.weight"],
        "m.router.bias": tensors["router.bias"],
        "m.experts.gate.weight": fused[:, ::2],
        "m.experts.up.weight": fused[:, 1::2],
        "m.experts.gate.bias": biases[:, ::2],
        "m.experts.up.bias": biases[:, 1::2],
        "m.experts.down.weight": tensors["experts.down_proj"].mT,
        "m.experts.down.bias": tensors["experts.down_proj_bias"],
    }


@pytest.mark.parametrize("size", [(S, B), (1, 1)], ids=["many tokens", "one token"])
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_match_transformers(name: str, size: tuple[int, int]):
    pytest.importorskip("transformers")
    config = CASES[name]
    hidden = torch.randn(*size, H, generator=generator(2))
    factors = torch.randn(*size, H, generator=generator(3))
    with one_thread():
        hf = hf_layer(name, config)
        x = hidden.double().transpose(0, 1).contiguous().requires_grad_(True)  # [b, s, h]
        expected = hf(x)
        expected = (expected if name != "gpt_oss" else expected[0]).transpose(0, 1)
        (expected * factors).sum().backward()
        bias = hf.gate.e_score_correction_bias.float() if config.router.expert_bias else None
        layer = Layer(config, hidden_size=H, bias=bias)
        weights = dict(hf.named_parameters())
        layer.load(to_mcore_names(weights))
        layer.assert_stable_routes(hidden)
        with nan_memory():
            output, dx = layer.step(hidden, factors)
    actual = {"output": output, "input gradient": dx, **merged(layer.gradients())}
    grads = to_mcore_names({name: weight.grad for name, weight in weights.items()})
    reference = {"output": expected, "input gradient": x.grad.transpose(0, 1), **grads}
    zeros = {name for name, grad in grads.items() if not grad.any()}
    assert not zeros
    assert_all_close(actual, reference, bound=5e-6)
    unused = grads["m.experts.up.weight"].flatten(1).abs().amax(1) == 0
    assert int(unused.sum()) == (config.num_experts - config.router.topk if size == (1, 1) else 0)


def token_loop(
    weights: Mapping[str, torch.Tensor], rows: torch.Tensor, config: MoEConfig
) -> tuple[torch.Tensor, int]:
    """Return each row's weighted sum of experts in fp64, and the number of dropped assignments."""
    router, activation = config.router, getattr(F, config.activation)
    scores = (rows @ weights["m.router.weight"].t()).softmax(-1)
    chosen = scores.topk(router.topk).indices
    probs = scores.gather(1, chosen)
    probs = probs / probs.sum(-1, keepdim=True)
    assignments = [(t, j) for t in range(len(rows)) for j in range(router.topk)]
    if config.drop_policy == "probs":
        assignments.sort(key=lambda assignment: -probs[assignment].item())
    remaining = [len(rows) * router.topk] * config.num_experts
    if config.capacity_factor is not None:
        share = config.capacity_factor * len(rows) * router.topk / config.num_experts
        remaining = [int(-(-share // 1))] * config.num_experts
    out, dropped = [torch.zeros_like(row) for row in rows], 0
    for t, j in assignments:
        e = int(chosen[t, j])
        if not remaining[e]:
            dropped += 1
            continue
        remaining[e] -= 1
        inner = weights["m.experts.up.weight"][e] @ rows[t]
        if config.gated:
            inner = activation(weights["m.experts.gate.weight"][e] @ rows[t]) * inner
        else:
            inner = activation(inner)
        out[t] = out[t] + probs[t, j] * (weights["m.experts.down.weight"][e] @ inner)
    return torch.stack(out), dropped


@pytest.mark.parametrize(
    ("factor", "policy", "gated", "activation"),
    [
        (None, "probs", False, "gelu"),
        (None, "probs", False, "relu"),
        (0.7, "probs", True, "silu"),
        (0.7, "position", True, "silu"),
        (1.0, "probs", False, "gelu"),
        (0.1, "position", False, "gelu"),  # one slot per expert
        (9.0, "probs", True, "silu"),  # capacity for all tokens
    ],
)
@pytest.mark.parametrize("recomputes", [False, True])
def test_experts_match_token_loop(
    factor: float | None, policy: str, gated: bool, activation: str, recomputes: bool
):
    config = MoEConfig(
        num_experts=19,
        ffn_hidden_size=FFN,
        router=RouterConfig(topk=2),
        gated=gated,
        activation=activation,
        capacity_factor=factor,
        drop_policy=policy,
    )
    hidden = torch.randn(S, B, H, generator=generator(4))
    factors = torch.randn(S, B, H, generator=generator(5))
    with one_thread():
        layer = Layer(config, hidden_size=H)
        layer.moe.recomputes = recomputes
        layer.assert_stable_routes(hidden)
        whole = merged(layer.shards(lambda handle: handle.get()))
        weights = {n: w.detach().double().requires_grad_(True) for n, w in whole.items()}
        x = hidden.double().requires_grad_(True)
        expected, dropped = token_loop(weights, x.flatten(0, 1), config)
        (expected.view(S, B, H) * factors).sum().backward()
        with nan_memory():
            output, dx = layer.step(hidden, factors)
    assert layer.moe.router.counted[19 + 1] == dropped
    assert (dropped > 0) == (factor is not None and factor <= 1.0)
    actual = {"output": output, "input gradient": dx, **merged(layer.gradients())}
    reference = {"output": expected.view(S, B, H), "input gradient": x.grad}
    reference |= {name: weight.grad for name, weight in weights.items()}
    assert_all_close(actual, reference, bound=5e-6)


def test_bf16_error_is_bounded_by_product_rounding():
    config = CASES["mixtral"]
    hidden, factors = (torch.randn(S, B, H, generator=generator(i)).bfloat16() for i in (6, 7))
    with one_thread():
        layer = Layer(config, hidden_size=H, dtype=torch.bfloat16)
        layer.assert_stable_routes(hidden.float())
        whole = merged(layer.shards(lambda handle: handle.get()))
        assert {w.dtype for w in whole.values()} == {torch.bfloat16}
        weights = {n: w.detach().double().requires_grad_(True) for n, w in whole.items()}
        x = hidden.double().requires_grad_(True)
        expected, _ = token_loop(weights, x.flatten(0, 1), config)
        (expected.view(S, B, H) * factors).sum().backward()
        output, dx = layer.step(hidden, factors)
    assert output.dtype == dx.dtype == torch.bfloat16
    actual = {"output": output, "input gradient": dx, **merged(layer.gradients())}
    reference = {"output": expected.view(S, B, H), "input gradient": x.grad}
    reference |= {name: weight.grad for name, weight in weights.items()}
    assert_all_close(actual, reference, bound=2.0**-6)  # each of three products rounds its operands


def test_invalid_moe_config_is_refused():
    single = ProcessGroupCollection.single()

    def build_moe(dispatcher: str = "auto", **changes: object) -> MoE:
        config = MoEConfig(**{"num_experts": 4, "ffn_hidden_size": FFN, **changes})
        context = make_layer_build(single, hidden_size=H, dispatcher=dispatcher)
        return MoE("m", config=config, build=context)

    for dispatcher, changes, message in (
        ("auto", {"capacity_factor": 0.0}, "moe-expert-capacity-factor 0.0 must be positive"),
        ("auto", {"drop_policy": "random"}, "moe-token-drop-policy 'random': use probs or"),
        ("auto", {"shared_gate": True}, "a shared expert gate needs a shared expert"),
        ("auto", {"router": RouterConfig(topk=5)}, "moe-router-topk 5 must be in 1 … 4"),
        ("flex", {}, "moe-token-dispatcher-type 'flex': use auto, allgather, alltoall"),
    ):
        with pytest.raises(ValueError, match=message):
            build_moe(dispatcher, **changes)
    assert build_moe().dispatcher == "allgather", "one rank, two experts per token"
