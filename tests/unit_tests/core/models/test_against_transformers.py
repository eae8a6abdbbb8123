# SPDX-License-Identifier: Apache-2.0
"""GPT against models of transformers in fp64: logits, loss and all gradients.

Among them are Llama, Qwen 2 and 3, StarCoder 2 (LayerNorm, plain MLP, biases) and StableLM
(partial rotary embeddings).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection

import pytest
import torch
import torch.nn.functional as F

from megatron.core import ProcessGroupCollection
from megatron.core.distributed import DataParallel
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.ops.rope import RopeScaling
from megatron.core.transformer import AttentionConfig, MLPConfig, NormConfig, RopeConfig
from megatron.core.weight_gather import Storage
from tests.support.closeness import assert_all_close
from tests.support.inputs import generator, microbatch, one_thread, perturbed
from tests.support.nan_memory import nan_memory

LAYERS, HIDDEN, HEADS, HEAD_DIM, FFN, VOCABULARY = 2, 24, 4, 8, 40, 53
SEQUENCE = 40

BASE = GPTConfig(
    num_layers=LAYERS,
    hidden_size=HIDDEN,
    vocab_size=VOCABULARY,
    attention=AttentionConfig(num_attention_heads=HEADS, num_query_groups=2, kv_channels=HEAD_DIM),
    mlp=MLPConfig(ffn_hidden_size=FFN),
    norm=NormConfig(epsilon=1e-3),
    rope=RopeConfig(base=500.0),
)


def base_config_with(*, groups: int = 2, attention=(), **changes) -> GPTConfig:
    """Return the base configuration with changes."""
    layer = dataclasses.replace(BASE.attention, num_query_groups=groups, **dict(attention))
    return dataclasses.replace(BASE, attention=layer, **changes)


PLAIN_MLP = MLPConfig(ffn_hidden_size=FFN, gated=False, activation="gelu_tanh", bias=True)
LAYER_NORM = NormConfig(kind="LayerNorm", epsilon=1e-3)
ALL_BIASES = {"qkv_bias": True, "output_bias": True}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

#: name -> (configuration, class in transformers, its further configuration fields)
CASES = {
    "llama-grouped": (BASE, "Llama", {}),
    "llama-multi-query-tied": (base_config_with(groups=1, tied=True), "Llama", {}),
    "llama-multi-head-biases": (
        base_config_with(
            groups=4, attention=ALL_BIASES, mlp=MLPConfig(ffn_hidden_size=FFN, bias=True)
        ),
        "Llama",
        {"attention_bias": True, "mlp_bias": True},
    ),
    "llama3-scaling": (
        base_config_with(
            rope=RopeConfig(
                base=500.0, scaling=RopeScaling(kind="llama3", original_max_position=16, **LLAMA3)
            )
        ),
        "Llama",
        {"scaling": {"rope_type": "llama3", "original_max_position_embeddings": 16, **LLAMA3}},
    ),
    "qwen2-tied": (base_config_with(attention={"qkv_bias": True}, tied=True), "Qwen2", {}),
    "qwen3": (base_config_with(attention={"qk_norm": True}), "Qwen3", {}),
    "starcoder2": (
        base_config_with(attention=ALL_BIASES, mlp=PLAIN_MLP, norm=LAYER_NORM, tied=True),
        "Starcoder2",
        {"use_bias": True, "norm_epsilon": 1e-3, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "stablelm": (
        base_config_with(
            groups=4,
            attention={"qkv_bias": True},
            norm=LAYER_NORM,
            rope=RopeConfig(base=500.0, percent=0.5),
        ),
        "StableLm",
        {"use_qkv_bias": True, "layer_norm_eps": 1e-3, "partial_rotary_factor": 0.5},
    ),
}

MODULE_NAMES = {
    "model.embed_tokens": "embedding", "model.norm": "decoder.final_norm", "lm_head": "head",
    "input_layernorm": (0, "norm"), "self_attn.q_proj": (0, "attention.query"),
    "self_attn.k_proj": (0, "attention.key"), "self_attn.v_proj": (0, "attention.value"),
    "self_attn.o_proj": (0, "attention.output"), "self_attn.q_norm": (0, "attention.query_norm"),
    "self_attn.k_norm": (0, "attention.key_norm"), "post_attention_layernorm": (1, "norm"),
    "mlp.gate_proj": (1, "mlp.gate"), "mlp.up_proj": (1, "mlp.up"),
    "mlp.down_proj": (1, "mlp.down"), "mlp.c_fc": (1, "mlp.up"), "mlp.c_proj": (1, "mlp.down"),
}  # fmt: skip


def mcore_name(hf_name: str) -> str:
    """Translate the name of a weight of transformers."""
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", hf_name)
    if layer:
        half, suffix = MODULE_NAMES[layer[2]]
        return f"decoder.blocks.{2 * int(layer[1]) + half}.{suffix}.{layer[3]}"
    module, _, kind = hf_name.rpartition(".")
    return f"{MODULE_NAMES[module]}.{kind}"


def hf_model(config: GPTConfig, kind: str, extra: dict) -> torch.nn.Module:
    """Return the model of transformers in fp64 with perturbed weights."""
    transformers = pytest.importorskip("transformers")
    extra = dict(extra)
    rope = {"rope_type": "default", "rope_theta": config.rope.base, **extra.pop("scaling", {})}
    if "partial_rotary_factor" in extra:
        rope["partial_rotary_factor"] = extra["partial_rotary_factor"]
    if kind != "StableLm":  # StableLM derives it
        extra["head_dim"] = HEAD_DIM
    norm = {} if config.norm.kind == "LayerNorm" else {"rms_norm_eps": config.norm.epsilon}
    hf_config = getattr(transformers, f"{kind}Config")(
        hidden_size=HEADS * HEAD_DIM if kind in ("StableLm", "Qwen2", "Starcoder2") else HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=config.attention.num_query_groups,
        intermediate_size=FFN,
        vocab_size=VOCABULARY,
        tie_word_embeddings=config.tied,
        rope_parameters=rope,
        attention_dropout=0.0,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        **norm,
        **extra,
    )
    hf_config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(hf_config).double().eval()
    perturbed_weights = perturbed(dict(model.named_parameters()), seed=1, scale=0.2)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(perturbed_weights[name])
    return model


def logical_tensors(model: GPTModel, flat_of) -> dict[str, torch.Tensor]:
    """Return views of whole logical tensors in each handle's flat storage."""
    tensors = {}
    for handle in model.store.handles.values():
        flat = flat_of(handle).view(-1)
        for box in model.store.boxes(handle):
            tensors[box.name] = flat[box.start : box.start + box.numel].view(box.sizes)
    return tensors


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_match_transformers(case: str):
    config, kind, extra = CASES[case]
    with one_thread():
        reference = hf_model(config, kind, extra)
        config = dataclasses.replace(config, hidden_size=reference.config.hidden_size)
        compare_with_reference(
            config, reference, lambda named: {mcore_name(n): w for n, w in named.items()}
        )


def compare_with_reference(
    config: GPTConfig,
    reference: torch.nn.Module,
    renamed: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    *,
    zeros: Collection[str] = (),
) -> None:
    """Compare logits, loss and gradients with an fp64 reference with equal weights.

    Args:
        renamed: maps tensors under names of `reference` to views under this project's names.
        zeros: names of weights whose gradient is exactly zero.
    """
    with one_thread():
        weights = renamed(dict(reference.named_parameters()))
        mcore = GPTModel(config, ProcessGroupCollection.single(), storage=Storage(initialize=False))
        targets = logical_tensors(mcore, lambda handle: handle.get())
        assert targets.keys() == weights.keys()
        for name, weight in weights.items():
            targets[name].copy_(weight.detach())
            weight.detach().copy_(targets[name])  # the same values, rounded to fp32
        batch = microbatch(
            seed=2, dp_rank=1, index=0, batch=2, sequence=SEQUENCE, vocabulary=VOCABULARY
        )
        token_weights = batch.loss_mask * torch.rand(2, SEQUENCE, generator=generator(3))

        logits = reference(batch.tokens, use_cache=False).logits  # [b, s, v]
        nll = F.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none")
        loss = (nll * token_weights).sum()
        loss.backward()

        engine = DataParallel(mcore.store, mcore.groups)
        with nan_memory():
            with torch.no_grad():
                got_logits = mcore.full_logits(batch.tokens).transpose(0, 1)
            engine.begin_step()
            got_loss, got_nll = mcore.loss(batch.tokens, batch.labels, token_weights)
            engine.backward(got_loss, last=True)
            engine.finish()
    assert_all_close(
        {"logits": got_logits, "loss": got_loss.detach(), "nll": got_nll},
        {"logits": logits.detach(), "loss": loss.detach(), "nll": nll.detach()},
    )
    gradients = logical_tensors(mcore, lambda handle: handle.main_grad)
    expected = renamed({name: weight.grad for name, weight in reference.named_parameters()})
    assert_all_close(gradients, expected, zeros=zeros)


def gpt2_to_mcore_names(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return views of GPT-2's tensors under this project's names.

    GPT-2's matrices are [in, out], and its queries, keys and values share one matrix.
    """
    block_modules = {
        "ln_1": (0, "norm"),
        "attn.c_proj": (0, "attention.output"),
        "ln_2": (1, "norm"),
    }
    block_modules |= {"mlp.c_fc": (1, "mlp.up"), "mlp.c_proj": (1, "mlp.down")}
    model_modules = {
        "wte": "embedding",
        "wpe": "embedding.position_embeddings",
        "ln_f": "decoder.final_norm",
    }
    renamed = {}
    for name, weight in named.items():
        module, _, kind = name.removeprefix("transformer.").rpartition(".")
        if module in model_modules:
            renamed[f"{model_modules[module]}.{kind}"] = weight
            continue
        _, layer, hf_module = module.split(".", 2)
        transposed = weight.t() if weight.ndim == 2 else weight
        if hf_module == "attn.c_attn":
            projections = zip(("query", "key", "value"), transposed.chunk(3), strict=True)
            attention = f"decoder.blocks.{2 * int(layer)}.attention"
            renamed |= {
                f"{attention}.{projection}.{kind}": rows for projection, rows in projections
            }
        else:
            half, mcore_module = block_modules[hf_module]
            renamed[f"decoder.blocks.{2 * int(layer) + half}.{mcore_module}.{kind}"] = transposed
    return renamed


def test_learned_positions_match_gpt2():
    transformers = pytest.importorskip("transformers")
    hidden = HEADS * HEAD_DIM
    hf_config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=hidden, n_layer=LAYERS, n_head=HEADS,
        n_inner=FFN, layer_norm_epsilon=1e-3, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    hf_config._attn_implementation = "eager"
    reference = transformers.GPT2LMHeadModel(hf_config).double().eval()
    perturbed_weights = perturbed(dict(reference.named_parameters()), seed=1, scale=0.2)
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            weight.copy_(perturbed_weights[name])
    config = base_config_with(
        groups=HEADS, attention=ALL_BIASES, mlp=PLAIN_MLP, norm=LAYER_NORM, tied=True, rope=None,
        hidden_size=hidden, max_position_embeddings=SEQUENCE,
    )  # fmt: skip
    # A key bias shifts all scores of a query equally.
    biases = [f"decoder.blocks.{2 * layer}.attention.key.bias" for layer in range(LAYERS)]
    compare_with_reference(config, reference, gpt2_to_mcore_names, zeros=biases)
