# SPDX-License-Identifier: Apache-2.0
"""Options of training out of a Hugging Face folder: the flags that `--load-hf` supplies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron.core.models.gpt import GPTConfig
from megatron.core.models.pattern import EXPERTS, symbols_of
from megatron.core.transformer import AttentionConfig, LatentAttentionConfig
from megatron.hf.folder import HuggingFaceFolder, open_folder
from megatron.hf.model_config import HuggingFaceModel, read_folder
from megatron.hf.read_weights import check_tensors
from megatron.hf.rope_fields import yarn_weight
from megatron.training.data.tokenizers import guess_type

#: What a run may choose although the folder says something: no weight and no output depends on it.
FREE = frozenset(
    {
        "attention-dropout",
        "hidden-dropout",
        "init-method-std",
        "max-position-embeddings",
        "tokenizer-model",
        "tokenizer-type",
    }
)


def folder_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that `--load-hf` adds to those given, by option name.

    Raises:
        ValueError: the folder cannot be used, or a given option makes another model than it holds;
            names all of these.
    """
    path = given.get("load-hf")
    if path is None:
        return {}
    folder, model = open_model(path, flag="--load-hf")
    found = {**model_options(model), **tokenizer_options(folder)}
    conflicts = [
        f"--{name} is {given[name]!r}, there {value!r}"
        for name, value in found.items()
        if name in given and not _same(name, given[name], value) and name not in FREE
    ]
    if conflicts:
        raise ValueError(
            f"--load-hf {path} holds another model: {'; '.join(conflicts)}: leave these out"
        )
    return {name: value for name, value in found.items() if name not in given}


def _same(name: str, given: Any, value: Any) -> bool:
    """Tell whether an option that is given says what a folder does."""
    if name == "hybrid-layer-pattern" and isinstance(given, str):
        return symbols_of(given) == value  # where it is cut into stages is the run's to choose
    return list(given) == list(value) if isinstance(value, tuple) else given == value


def open_model(path: str, *, flag: str) -> tuple[HuggingFaceFolder, HuggingFaceModel]:
    """Look at a folder and translate its config.json. Raises ValueError, which names `flag`."""
    try:
        folder = open_folder(path)
        model = read_folder(folder)
        with folder.open_tensors() as opened:  # before anything is made of what config.json says
            check_tensors(folder, opened, model)
        return folder, model
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def model_options(model: HuggingFaceModel) -> dict[str, Any]:
    """Return the options that describe a model, by name; `gpt_config` makes it of them again."""
    config = model.config
    return {
        "num-layers": config.num_layers,
        "hidden-size": config.hidden_size,
        "max-position-embeddings": model.max_length,
        "normalization": config.norm.kind,
        "norm-epsilon": config.norm.epsilon,
        "untie-embeddings-and-output-weights": not config.tied,
        "hidden-dropout": config.hidden_dropout,
        "init-method-std": config.init_std,
        "vocab-size": config.vocab_size,
        "disable-bias-linear": not _all_biases(config),
        **_inner_options(config),
        **_attention_options(config),
        **_expert_options(config),
        **_position_options(config),
        **_hybrid_options(config),
    }


def _all_biases(config: GPTConfig) -> bool:
    """Return whether attention and MLPs have all biases that they can have."""
    attention, mlp = config.attention, config.mlp
    if not isinstance(attention, AttentionConfig) or mlp is None:
        return False
    return attention.qkv_bias and attention.output_bias and mlp.bias


def _inner_options(config: GPTConfig) -> dict[str, Any]:
    """Return the options of MLPs that experts share, and those of MLPs alone."""
    inner = config.mlp or config.moe
    if inner is None:
        return {}
    found: dict[str, Any] = {"swiglu": inner.gated}
    if inner.activation == "squared_relu":
        found["squared-relu"] = True
    if config.mlp is not None:
        found["ffn-hidden-size"] = config.mlp.ffn_hidden_size
        found["add-mlp-bias"] = config.mlp.bias and not _all_biases(config)
    return found


def _attention_options(config: GPTConfig) -> dict[str, Any]:
    attention = config.attention
    if attention is None:
        return {}
    found: dict[str, Any] = {
        "num-attention-heads": attention.num_attention_heads,
        "attention-dropout": attention.dropout,
    }
    if isinstance(attention, LatentAttentionConfig):
        return found | {
            "multi-latent-attention": True,
            "q-lora-rank": attention.q_lora_rank,
            "kv-lora-rank": attention.kv_lora_rank,
            "qk-head-dim": attention.nope_channels,
            "qk-pos-emb-head-dim": attention.rope_channels,
            "v-head-dim": attention.value_channels,
        }
    if attention.output_gate:
        found["attention-output-gate"] = True
    all_biases = _all_biases(config)
    return found | {
        "group-query-attention": True,
        "num-query-groups": attention.num_query_groups,
        "kv-channels": attention.kv_channels,
        "qk-layernorm": attention.qk_norm,
        "add-qkv-bias": attention.qkv_bias and not all_biases,
        "add-attention-output-bias": attention.output_bias and not all_biases,
    }


def _hybrid_options(config: GPTConfig) -> dict[str, Any]:
    """Return the options of a layer pattern, of recurrent mixers and of zero-centred norms."""
    found: dict[str, Any] = {}
    if config.pattern:
        found["hybrid-layer-pattern"] = config.pattern
    if config.norm.zero_centered:
        found["apply-layernorm-1p"] = True
    delta_net, mamba = config.delta_net, config.mamba
    if delta_net is not None:
        found |= {
            "linear-num-key-heads": delta_net.num_key_heads,
            "linear-num-value-heads": delta_net.num_value_heads,
            "linear-key-head-dim": delta_net.key_channels,
            "linear-value-head-dim": delta_net.value_channels,
            "linear-conv-kernel-dim": delta_net.conv_width,
        }
    if mamba is not None:
        found |= {
            "mamba-num-heads": mamba.num_heads,
            "mamba-head-dim": mamba.head_channels,
            "mamba-state-dim": mamba.state_channels,
            "mamba-num-groups": mamba.num_groups,
            "mamba-norm-groups": mamba.normed_groups,
            "mamba-conv-kernel-dim": mamba.conv_width,
            "mamba-conv-bias": mamba.conv_bias,
            "add-mamba-bias": mamba.bias,
        }
        if mamba.dt_limit != (0.0, math.inf):
            least, most = mamba.dt_limit
            found["mamba-dt-limit"] = (least,) if most == math.inf else (least, most)
    return found


def _expert_options(config: GPTConfig) -> dict[str, Any]:
    """Return the options of experts and of further prediction, without those of training alone."""
    found: dict[str, Any] = {}
    if config.mtp_num_layers:
        found["mtp-num-layers"] = config.mtp_num_layers
    moe = config.moe
    if moe is None:
        return found
    router = moe.router
    if config.ffn_pattern:
        layers = ",".join("01"[ffn == EXPERTS] for ffn in config.ffn_pattern)
        found["moe-layer-freq"] = layers
    return found | {
        "num-experts": moe.num_experts,
        "moe-ffn-hidden-size": moe.ffn_hidden_size,
        "moe-shared-expert-intermediate-size": moe.shared_ffn_hidden_size,
        "moe-shared-expert-gate": moe.shared_gate,
        "moe-router-topk": router.topk,
        "moe-router-score-function": router.score_function,
        "moe-router-pre-softmax": not router.normalize,
        "moe-router-num-groups": router.num_groups,
        "moe-router-group-topk": router.group_topk,
        "moe-router-topk-scaling-factor": router.scaling_factor,
        "moe-router-enable-expert-bias": router.expert_bias,
    }


def tokenizer_options(folder: HuggingFaceFolder) -> dict[str, Any]:
    """Return the options of a folder's tokenizer, by name; none if it has no tokenizer."""
    path = folder.tokenizer
    if path is None:
        return {}
    return {"tokenizer-type": guess_type(path), "tokenizer-model": str(path.absolute())}


def _position_options(config: GPTConfig) -> dict[str, Any]:
    rope = config.rope
    if rope is None:
        return {"position-embedding-type": "none"}
    found: dict[str, Any] = {
        "position-embedding-type": "rope",
        "rotary-base": rope.base,
        "rotary-percent": rope.percent,
    }
    if rope.interleaved:
        found["rotary-interleaved"] = True
    scaling = rope.scaling
    if scaling is None:
        return found
    if scaling.kind == "linear":
        return {**found, "rotary-seq-len-interpolation-factor": scaling.factor}
    if scaling.kind == "llama3":
        return {
            **found,
            "use-rope-scaling": True,
            "rope-scaling-factor": scaling.factor,
            "rope-scaling-low-freq-factor": scaling.low_freq_factor,
            "rope-scaling-high-freq-factor": scaling.high_freq_factor,
            "rope-scaling-original-max-position": scaling.original_max_position,
        }
    found |= {
        "position-embedding-type": "yarn",
        "yarn-rotary-scaling-factor": scaling.factor,
        "yarn-original-max-position-embeddings": scaling.original_max_position,
        "yarn-beta-fast": scaling.beta_fast,
        "yarn-beta-slow": scaling.beta_slow,
        "yarn-attention-factor": scaling.attention_factor,
    }
    if isinstance(config.attention, LatentAttentionConfig):
        found["mscale-all-dim"] = yarn_weight(config.attention.scale_factor, scaling.factor)
        found["yarn-attention-factor"] = scaling.magnitude
    return found
