# SPDX-License-Identifier: Apache-2.0
"""A step creates tensors only on the model's device: tested on `meta`, without a GPU.

An operation that mixes `meta` and CPU tensors fails like one that mixes GPU and CPU tensors. A host
read, which would synchronize a GPU, fails as well.
"""

from __future__ import annotations

import pytest
import torch

from megatron.core import ProcessGroupCollection
from megatron.core.context_parallel import SequenceLayout
from megatron.core.distributed import DataParallel
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.transformer import AttentionConfig, MLPConfig, NormConfig, RopeConfig
from megatron.core.weight_gather import Storage

META = torch.device("meta")
MODELS = {
    "llama with everything": GPTConfig(
        num_layers=2,
        hidden_size=24,
        vocab_size=61,
        attention=AttentionConfig(
            num_attention_heads=4,
            num_query_groups=2,
            kv_channels=10,
            qk_norm=True,
            qkv_bias=True,
            dropout=0.1,
        ),
        mlp=MLPConfig(ffn_hidden_size=40),
        hidden_dropout=0.1,
    ),
    "gpt": GPTConfig(
        num_layers=2,
        hidden_size=24,
        vocab_size=61,
        attention=AttentionConfig(
            num_attention_heads=4, num_query_groups=4, kv_channels=8, output_bias=True
        ),
        mlp=MLPConfig(ffn_hidden_size=36, gated=False, activation="gelu", bias=True),
        norm=NormConfig(kind="LayerNorm"),
        rope=RopeConfig(percent=0.5),
        tied=True,
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_stays_on_its_device_without_host_reads(name, packed, dtype):
    groups = ProcessGroupCollection.single()
    model = GPTModel(
        MODELS[name], groups, dtype=dtype, device=META, storage=Storage(initialize=False)
    )
    engine = DataParallel(model.store, groups)
    tokens = torch.zeros(2, 33, dtype=torch.int64, device=META)
    weights = torch.ones(2, 32, device=META)
    rows = {"sample_ids": torch.arange(2, device=META)}
    if packed:
        rows["positions"] = torch.zeros(2, 32, dtype=torch.int64, device=META)
        rows["document_ids"] = torch.zeros(2, 32, dtype=torch.int32, device=META)
    layout = SequenceLayout.of_rows(32, device=META, **rows)
    engine.begin_step()
    for final in (False, True):
        loss, nll = model.loss(tokens[:, :-1], tokens[:, 1:], weights, layout=layout)
        engine.backward(loss, last=final)
    engine.finish()
    assert (loss.device, nll.shape) == (META, (2, 32))
    layout = SequenceLayout.of_rows(32, device=META)
    with torch.no_grad():
        assert model(tokens[:, :-1], layout=layout).device == META
