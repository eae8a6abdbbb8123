# SPDX-License-Identifier: Apache-2.0
"""Flags of a Megatron-LM script with multi-latent attention describe transformers' model."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron.cli.launch import Launch
from megatron.core import ProcessGroupCollection
from megatron.core.dist_checkpointing import Solo, weight_chunks
from megatron.core.models import GPTModel
from megatron.core.weight_gather import Storage
from megatron.hf.config_json import differences
from megatron.hf.read_weights import read_weights
from megatron.training.checkpointing.hf_import import open_model
from megatron.training.config.model_table import gpt_config
from megatron.training.pretrain_gpt import read_run
from tests.support.hf_folders import DEEPSEEK, VOCABULARY, make_model, save_folder
from tests.support.inputs import generator, one_thread


def test_mla_script_matches_transformers(tmp_path: Path) -> None:
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
    }
    hf_model = make_model("deepseek", rope_parameters=yarn, n_group=1, topk_group=1)
    folder, source = open_model(str(save_folder(hf_model, tmp_path / "hf")), flag="--load-hf")
    sizes = {flag: DEEPSEEK[name] for flag, name in {
        "num-layers": "num_hidden_layers", "num-attention-heads": "num_attention_heads",
        "q-lora-rank": "q_lora_rank", "kv-lora-rank": "kv_lora_rank",
        "qk-nope-head-dim": "qk_nope_head_dim", "qk-rope-head-dim": "qk_rope_head_dim",
        "v-head-dim": "v_head_dim", "num-experts": "n_routed_experts",
        "moe-router-topk": "num_experts_per_tok", "moe-ffn-hidden-size": "moe_intermediate_size",
        "moe-shared-expert-intermediate-size": "moe_intermediate_size",
        "moe-router-topk-scaling-factor": "routed_scaling_factor", "norm-epsilon": "rms_norm_eps",
    }.items()}  # fmt: skip
    script = (
        f"{' '.join(f'--{flag} {size}' for flag, size in sizes.items())} --hidden-size 48 "
        "--ffn-hidden-size 40 --moe-layer-freq [0]*1+[1]*2 --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-num-groups 1 --moe-router-group-topk 1 "
        "--normalization RMSNorm --swiglu --disable-bias-linear --rotary-interleaved "
        "--untie-embeddings-and-output-weights --position-embedding-type rope --qk-layernorm "
        f"--multi-latent-attention --seq-length 50 --micro-batch-size 1 --train-iters 1 --lr 1e-3 "
        f"--mock-data --vocab-size {VOCABULARY}"
    )
    tokens = torch.randint(VOCABULARY, (2, 50), generator=generator(4))
    logits = []
    for rope_flags in ("", "--rope-type rope"):
        config = gpt_config(read_run(f"{script} {rope_flags}".split(), Launch()).config, VOCABULARY)
        mismatches = differences(source.config, config)
        assert bool(mismatches) == bool(rope_flags), mismatches
        storage = Storage(initialize=False)
        model = GPTModel(config, ProcessGroupCollection.single(), storage=storage)
        read_weights(folder, source, weight_chunks(model.store), coordinator=Solo())
        with one_thread(), torch.no_grad():
            logits.append(model.full_logits(tokens).transpose(0, 1))
    with one_thread(), torch.no_grad():
        expected = hf_model(tokens, use_cache=False).logits
    assert expected.std() > 1  # otherwise an absolute bound would prove little
    torch.testing.assert_close(logits[0], expected, rtol=0, atol=1e-4)
    assert (logits[1] - expected).abs().max() > 0.1, "plain RoPE is a different model"
