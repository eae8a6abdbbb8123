# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts in config.json: read and written, for each architecture that has them."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import GPTConfig
from megatron.core.models.pattern import DENSE, EXPERTS
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.hf.architectures import (
    DEEPSEEK_V3,
    MIXTRAL,
    NEMOTRON_H,
    QWEN3_MOE,
    QWEN3_NEXT,
)
from megatron.hf.entries import Architecture
from megatron.hf.fields import Fields

#: Groups of experts count by the sum of so many best scores in DeepSeek-V3 and Nemotron-H.
GROUP_CANDIDATES = 2


def read_experts(
    kind: Architecture, fields: Fields, num_layers: int
) -> tuple[MoEConfig | None, str]:
    """Return the mixture of experts and what follows each layer's mixer, a symbol a layer.

    Raises:
        ValueError: a value that is not supported; it names the field.
    """
    if kind is MIXTRAL:
        return _mixtral(fields), EXPERTS * num_layers
    if kind in (QWEN3_MOE, QWEN3_NEXT):
        pattern = _qwen3_pattern(fields, num_layers)
        return (_qwen3(kind, fields) if EXPERTS in pattern else None), pattern
    if kind is DEEPSEEK_V3:
        dense = min(num_layers, fields.count("first_k_dense_replace", least=0))
        pattern = DENSE * dense + EXPERTS * (num_layers - dense)
        return (_deepseek(fields) if EXPERTS in pattern else None), pattern
    return None, DENSE * num_layers


def write_experts(kind: Architecture, config: GPTConfig) -> dict[str, Any]:
    """Return the fields of the mixture of experts and of which layers have it.

    What the architecture cannot be shows when this is read back.
    """
    if kind is DEEPSEEK_V3:
        first = config.ffn_pattern.find(EXPERTS)
        found: dict[str, Any] = {
            "first_k_dense_replace": config.num_layers if first < 0 else first,
            "num_nextn_predict_layers": config.mtp_num_layers,
        }
        return found if config.moe is None else {**found, **_write_deepseek(config.moe)}
    moe = config.moe
    if kind is NEMOTRON_H and moe is not None:
        return _write_nemotron(moe)
    dense = [layer for layer, ffn in enumerate(config.blocks[1::2]) if ffn == DENSE]
    if kind is QWEN3_NEXT and moe is None:
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    if kind not in (MIXTRAL, QWEN3_MOE, QWEN3_NEXT) or moe is None:
        return {}
    shared = {"num_experts_per_tok": moe.router.topk}
    if kind is MIXTRAL:
        inner = {"intermediate_size": moe.ffn_hidden_size, "num_local_experts": moe.num_experts}
        return {**shared, **inner}
    found = {
        **shared,
        "num_experts": moe.num_experts,
        "moe_intermediate_size": moe.ffn_hidden_size,
        "norm_topk_prob": moe.router.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }
    if kind is QWEN3_NEXT:
        found["shared_expert_intermediate_size"] = moe.shared_ffn_hidden_size
    return found


def _mixtral(fields: Fields) -> MoEConfig:
    return MoEConfig(
        num_experts=fields.count_of("num_local_experts", "num_experts"),
        ffn_hidden_size=fields.count("intermediate_size"),
        router=RouterConfig(topk=fields.count("num_experts_per_tok")),
    )


def _qwen3(kind: Architecture, fields: Fields) -> MoEConfig:
    shared = None
    if kind is QWEN3_NEXT:
        shared = fields.count("shared_expert_intermediate_size")
    return MoEConfig(
        num_experts=fields.count_of("num_experts", "num_local_experts"),
        ffn_hidden_size=fields.count("moe_intermediate_size"),
        router=RouterConfig(
            topk=fields.count("num_experts_per_tok"),
            normalize=fields.flag("norm_topk_prob", False),
        ),
        shared_ffn_hidden_size=shared,
        shared_gate=shared is not None,
    )


def _qwen3_pattern(fields: Fields, num_layers: int) -> str:
    """Return which layers have experts: every `decoder_sparse_step`-th, less those listed."""
    step = fields.count("decoder_sparse_step", 1)
    dense = fields.find("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        fields.refuse("mlp_only_layers", "expected numbers of layers")
    return "".join(
        DENSE if layer in dense or (layer + 1) % step else EXPERTS for layer in range(num_layers)
    )


def _deepseek(fields: Fields) -> MoEConfig:
    fields.must_be("scoring_func", "sigmoid")
    fields.must_be("topk_method", "noaux_tc")
    fields.must_be("moe_layer_freq", 1)
    inner = fields.count("moe_intermediate_size")
    return MoEConfig(
        num_experts=fields.count_of("n_routed_experts", "num_local_experts"),
        ffn_hidden_size=inner,
        router=_sigmoid_router(fields),
        shared_ffn_hidden_size=inner * fields.count("n_shared_experts"),
    )


def read_nemotron_experts(fields: Fields) -> MoEConfig:
    """Return the mixture of experts of Nemotron-H.

    Raises:
        ValueError: a value that is not supported; it names the field.
    """
    fields.must_be("n_shared_experts", 1)
    if fields.flag("mlp_bias", False):
        fields.refuse("mlp_bias", "with experts it is not supported")
    return MoEConfig(
        num_experts=fields.count_of("n_routed_experts", "num_local_experts"),
        ffn_hidden_size=fields.count("moe_intermediate_size"),
        router=_sigmoid_router(fields),
        gated=False,
        activation="squared_relu",
        shared_ffn_hidden_size=fields.count("moe_shared_expert_intermediate_size"),
    )


def _sigmoid_router(fields: Fields) -> RouterConfig:
    groups, best = fields.count("n_group"), fields.count("topk_group")
    limited = groups != best
    return RouterConfig(
        topk=fields.count("num_experts_per_tok"),
        score_function="sigmoid",
        normalize=fields.flag("norm_topk_prob", True),
        scaling_factor=fields.number("routed_scaling_factor"),
        num_groups=groups if limited else None,
        group_topk=best if limited else None,
        group_candidates=GROUP_CANDIDATES,
        expert_bias=True,
    )


def _write_deepseek(moe: MoEConfig) -> dict[str, Any]:
    return {
        **_write_sigmoid_router(moe),
        "n_shared_experts": max(1, (moe.shared_ffn_hidden_size or 0) // moe.ffn_hidden_size),
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def _write_nemotron(moe: MoEConfig) -> dict[str, Any]:
    return {
        **_write_sigmoid_router(moe),
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size,
    }


def _write_sigmoid_router(moe: MoEConfig) -> dict[str, Any]:
    router = moe.router
    return {
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": router.topk,
        "moe_intermediate_size": moe.ffn_hidden_size,
        "n_group": router.num_groups or 1,
        "topk_group": router.group_topk or 1,
        "norm_topk_prob": router.normalize,
        "routed_scaling_factor": router.scaling_factor,
    }
