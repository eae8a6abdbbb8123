# SPDX-License-Identifier: Apache-2.0
"""Models with multi-token prediction, and microbatches of whole rows for them."""

from __future__ import annotations

import dataclasses

import torch

from megatron.core.models import GPTConfig
from megatron.core.models.gpt import shift_targets
from megatron.core.models.gpt_config import MTPConfig
from megatron.core.transformer import AttentionConfig, MLPConfig, NormConfig
from tests.support.inputs import Microbatch, microbatch

CONFIG = GPTConfig(
    num_layers=2,
    hidden_size=24,
    vocab_size=37,
    attention=AttentionConfig(num_attention_heads=4, num_query_groups=2, kv_channels=10),
    mlp=MLPConfig(ffn_hidden_size=20),
    init_std=0.2,
    mtp=MTPConfig(num_layers=2, loss_factor=0.3),
)
#: LayerNorm with biases, and tied embeddings.
TIED = dataclasses.replace(
    CONFIG,
    norm=NormConfig(kind="LayerNorm"),
    mlp=MLPConfig(ffn_hidden_size=20, gated=False, activation="gelu", bias=True),
    tied=True,
    mtp=MTPConfig(num_layers=1, loss_factor=0.3),
)
LENGTH, ROWS = 12, 2
DOCUMENT_BOUNDS = ((0, 5, 6, LENGTH), (0, 9, LENGTH))


def documents() -> dict[str, torch.Tensor]:
    """Return positions and document ids of the rows of `DOCUMENT_BOUNDS`, [b, s]."""
    indices = torch.arange(LENGTH)
    starts = [torch.tensor(row[:-1]) for row in DOCUMENT_BOUNDS]
    ids = torch.stack([(indices[:, None] >= s).sum(1) - 1 for s in starts])
    positions = torch.stack([indices - s[i] for s, i in zip(starts, ids, strict=True)])
    return {"positions": positions, "document_ids": ids}


def rows_of(dp_rank: int, index: int, *, depths: int, packed: bool) -> Microbatch:
    """Return a microbatch of whole rows with the targets of `depths` MTP layers."""
    batch = microbatch(
        seed=7,
        dp_rank=dp_rank,
        index=index,
        batch=ROWS,
        sequence=LENGTH,
        vocabulary=CONFIG.vocab_size,
    )
    if packed:
        batch = dataclasses.replace(batch, **documents())
    fields = (batch.tokens, batch.labels, batch.loss_mask)
    mtp_targets = shift_targets(*fields, num_layers=depths, document_ids=batch.document_ids)
    return dataclasses.replace(batch, mtp_targets=mtp_targets)
