# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders for tests: small random models of odd shapes, every weight random."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hf_family_cases import CLASS_NAMES, FAMILY_CASES, RECURRENT_CASES, ZERO_CENTERED

VOCABULARY, LENGTH = 263, 128
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}

#: name: (class in transformers, what its configuration has beside the shape)
DENSE_CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama-3to1": ("Llama", {"num_attention_heads": 6, "num_key_value_heads": 2}),
    "llama-tied-llama3": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-attention-bias": ("Llama", {"attention_bias": True, "rope_parameters": LINEAR}),
    "llama-mlp-bias": ("Llama", {"mlp_bias": True, "num_key_value_heads": 8}),
    "qwen3-8to1": ("Qwen3", {"num_key_value_heads": 1}),
    "qwen3-tied-yarn": ("Qwen3", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3-biases": ("Qwen3", {"attention_bias": True, "num_attention_heads": 6}),
    "qwen3-window": (
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
    ),
    "qwen2-3to1-linear": (
        "Qwen2",
        {"num_attention_heads": 6, "tie_word_embeddings": True, "rope_parameters": LINEAR},
    ),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
    ),
    "mistral": ("Mistral", {"sliding_window": None, "num_key_value_heads": 4}),
    "mistral-window-yarn": ("Mistral", {"sliding_window": 7, "rope_parameters": YARN}),
    "seedoss": ("SeedOss", {"num_attention_heads": 6}),
    "seedoss-biases": (
        "SeedOss",
        {
            "attention_bias": False,
            "attention_out_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}

#: The same of models with experts.
DEEPSEEK: dict[str, Any] = {
    "rms_norm_eps": 1e-6, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 6, "q_lora_rank": 14, "kv_lora_rank": 18, "qk_nope_head_dim": 7,
    "qk_rope_head_dim": 10, "v_head_dim": 9, "n_routed_experts": 9, "num_experts_per_tok": 4,
    "moe_intermediate_size": 22, "first_k_dense_replace": 1, "n_group": 3, "topk_group": 2,
    "n_shared_experts": 1, "routed_scaling_factor": 1.7, "num_mtp_layers": 1,
}  # fmt: skip
MSCALE = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}
#: As in Kimi-K2: a step, no ramp, between features that are stretched and those that are not.
KIMI_YARN = {**MSCALE, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 1.0, "beta_slow": 1.0}
QWEN2_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 22,
    "shared_expert_intermediate_size": 14,
}
QWEN3_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 22}
EXPERT_CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-tied-3of8": (
        "Mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "tie_word_embeddings": True},
    ),
    "qwen3moe-yarn": ("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": True, "rope_parameters": YARN}),
    "qwen3moe-mixed-biases": (
        "Qwen3Moe",
        {
            **QWEN3_MOE,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "attention_bias": True,
        },
    ),
    "qwen2moe": ("Qwen2Moe", QWEN2_MOE),
    "qwen2moe-mixed-unbiased": (
        "Qwen2Moe",
        {
            **QWEN2_MOE,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": True,
            "qkv_bias": False,
            "rope_parameters": YARN,
        },
    ),
    "deepseek": ("DeepseekV3", DEEPSEEK),
    "deepseek-even": ("DeepseekV3", {**DEEPSEEK, "n_routed_experts": 12}),
    "deepseek-direct-yarn": (
        "DeepseekV3",
        {
            **DEEPSEEK,
            "q_lora_rank": None,
            "rope_interleave": False,
            "rope_parameters": MSCALE,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
}
CASES = {**DENSE_CASES, **EXPERT_CASES}

#: The same of hybrids: two value heads a key head, a quarter of 16 features that rotate.
QWEN3_NEXT: dict[str, Any] = {
    "rms_norm_eps": 1e-2, "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 6, "head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 10,
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 22,
    "shared_expert_intermediate_size": 14,
}  # fmt: skip
_MAMBA: dict[str, Any] = {"n_groups": 3, "layer_norm_epsilon": 1e-3}
_NEMOTRON: dict[str, Any] = {
    **_MAMBA,
    "mamba_num_heads": 12,
    "mamba_head_dim": 7,
    "ssm_state_size": 9,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 22,
    "moe_shared_expert_intermediate_size": 26,
    "routed_scaling_factor": 1.7,
    "time_step_min": 1e-30,  # else transformers bounds steps by it, and not by their limit
}
HYBRID_CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "qwen3next": ("Qwen3Next", QWEN3_NEXT),
    "qwen3next-mixed-biases": (
        "Qwen3Next",
        {
            **QWEN3_NEXT,
            "layer_types": ["full_attention", *["linear_attention"] * 2],
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "attention_bias": True,
            "tie_word_embeddings": True,
            "norm_topk_prob": False,
            "linear_num_value_heads": 2,
            "rope_parameters": {**YARN, "partial_rotary_factor": 0.5},
        },
    ),
    "mamba2": ("Mamba2", {**_MAMBA, "num_heads": 12, "head_dim": 8, "state_size": 9}),
    "mamba2-tied-biases": (
        "Mamba2",
        {
            **_MAMBA,
            "num_heads": 6,
            "head_dim": 16,
            "n_groups": 1,
            "state_size": 9,
            "use_bias": True,
            "use_conv_bias": False,
            "tie_word_embeddings": True,
            "time_step_limit": (0.1, 1.5),
        },
    ),
    "nemotronh": ("NemotronH", {**_NEMOTRON, "hybrid_override_pattern": "ME*M-"}),
    "nemotronh-groups": (
        "NemotronH",
        {
            **_NEMOTRON,
            "layers_block_type": ["moe", "mamba", "attention"],
            "n_group": 4,
            "topk_group": 2,
            "use_bias": True,
            "norm_topk_prob": False,
        },
    ),
    "granitehybrid-dense": (
        "GraniteMoeHybrid",
        {
            "num_local_experts": 0,
            "shared_intermediate_size": 22,
            "layer_types": ["attention", "mamba"],
            "embedding_multiplier": 5.5,
            "mamba_n_heads": 12,
            "mamba_d_state": 9,
            "rms_norm_eps": 1e-2,
        },
    ),
    "nemotronh-dense": (
        "NemotronH",
        {**_NEMOTRON, "hybrid_override_pattern": "M-*-", "mlp_bias": True},
    ),
}
ALL_CASES = {**CASES, **HYBRID_CASES, **FAMILY_CASES}
#: Classes whose weights are smaller: a recurrence that is normalised magnifies rounding.
HYBRIDS = frozenset(kind for kind, _ in HYBRID_CASES.values()) | {
    FAMILY_CASES[case][0] for case in RECURRENT_CASES
}


def _center(kind: str, name: str) -> float:
    """Return the mean of the elements of a one-dimensional weight."""
    if name.endswith("A_log"):
        return -4.0  # a state that lasts from chunk to chunk
    if name.endswith((".D", "dt_bias", "linear_attn.norm.weight", "mamba.norm.weight")):
        return 1.0
    plain = kind not in ZERO_CENTERED or name.endswith(".bias")
    return 1.0 if plain else 0.0  # a norm's distance from one


def make_model(case: str, **changes: Any) -> Any:
    """Build a model of transformers with every weight, norms and biases included, random."""
    transformers = pytest.importorskip("transformers")
    kind, extra = ALL_CASES[case]
    # Llama's own check wants hidden_size to divide by the heads; head_dim is another number.
    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "max_position_embeddings": LENGTH,
        "rms_norm_eps": 1e-3,
        "bos_token_id": None,
        "eos_token_id": 7,
        "pad_token_id": None,
        **extra,
        **changes,
    }
    if kind == "NemotronH":
        del config["num_hidden_layers"]
    text_class = getattr(transformers, f"{kind}TextConfig", None)
    config_class = text_class or getattr(transformers, f"{kind}Config")
    if case in FAMILY_CASES:
        supported = {field.name for field in dataclasses.fields(config_class)}
        supported |= {*extra, *changes}
        config = {name: value for name, value in config.items() if name in supported}
    model_config = config_class(**config)
    model_config._attn_implementation = model_config._experts_implementation = "eager"
    model = getattr(transformers, CLASS_NAMES.get(kind, f"{kind}ForCausalLM"))(model_config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        buffers = dict(model.named_buffers())
        biases = (t for name, t in buffers.items() if name.endswith("e_score_correction_bias"))
        named = [*model.named_parameters(), *(("", bias) for bias in biases)]
        for name, weight in named:
            center = _center(kind, name) if weight.ndim == 1 else 0.0
            weight.copy_(
                center
                + (0.2 if kind in HYBRIDS else 0.3) * torch.randn(weight.shape, generator=generator)
            )
    return model


def make_classifier(case: str, num_labels: int, **changes: Any) -> Any:
    """Build the model of transformers with a random classification head."""
    transformers = pytest.importorskip("transformers")
    causal = make_model(case, **changes)
    kind, config = ALL_CASES[case][0], causal.config
    config.num_labels = num_labels
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()
    model.model.load_state_dict(causal.model.state_dict())
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        model.score.weight.copy_(0.3 * torch.randn(model.score.weight.shape, generator=generator))
    return model


def save_folder(model: Any, folder: Path, **options: Any) -> Path:
    """Save a model as transformers does, quietly."""
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        model.save_pretrained(str(folder), **options)
    return folder


def load_folder(folder: Path, auto_class: str = "AutoModelForCausalLM") -> Any:
    """Load a model as transformers does, in the dtype it has, quietly."""
    transformers = pytest.importorskip("transformers")
    with contextlib.redirect_stderr(io.StringIO()):
        return (
            getattr(transformers, auto_class)
            .from_pretrained(
                str(folder), attn_implementation="eager", experts_implementation="eager"
            )
            .eval()
        )


def change_json(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file; None removes one."""
    fields = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    text = json.dumps({key: value for key, value in fields.items() if value is not None})
    path.write_text(text, encoding="utf-8")


def raw_safetensors(header: object, data: bytes, *, length: int | None = None) -> bytes:
    """Return the bytes of a file with any header: an object, or text as it is."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str, shape: Sequence[int], begin: int, end: int) -> dict[str, Any]:
    """Return a tensor's entry of a header."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def write_pooling(folder: Path, *kinds: str, **config: Any) -> Path:
    """Write what sentence-transformers writes about pooling."""
    modules = [
        {"idx": n, "name": str(n), "path": f"{n}_{kind}" if n else "", "type": f"st.models.{kind}"}
        for n, kind in enumerate(kinds)
    ]
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return folder
