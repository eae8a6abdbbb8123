# SPDX-License-Identifier: Apache-2.0
"""The same logits from `transformers` and from us: what `--verify` compares.

This is the one module that imports the library `transformers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.core.dist_checkpointing import (
    CheckpointError,
    load_checkpoint,
    read_extra,
    weight_chunks,
)
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.weight_gather import Storage
from megatron.hf.architectures import DEEPSEEK_V3, KIMI_K2, NEMOTRON_H
from megatron.hf.folder import CONFIG, read_object

#: Largest difference between two logits in fp32, in units of the largest one.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class LogitDifference:
    """How far logits are from those of `transformers`.

    Args:
        most: the largest difference.
        largest: the largest logit there, without its sign.
    """

    most: float
    largest: float

    def __str__(self) -> str:
        return f"{self.most:.3g}, the largest is {self.largest:.3g}"


#: Tokens that are compared: two rows, as many positions as may show a scaled rotary embedding.
ROWS, MAX_TOKENS = 2, 64


def compare_logits(
    checkpoint: Path, folder: Path, *, dtype: torch.dtype | None = None
) -> LogitDifference:
    """Return how far the logits of a checkpoint and of a folder differ, both in fp32.

    Both models are in memory at once.

    Args:
        checkpoint, folder: what to compare.
        dtype: what the weights were converted to on the way: both are rounded to it first.

    Raises:
        ValueError: transformers is not installed, or the difference is above `TOLERANCE` of
            the largest logit.
    """
    try:
        import transformers
    except ImportError:
        raise ValueError("--verify needs transformers: pip install transformers") from None
    config = GPTConfig.from_json(read_extra(checkpoint)["model"])
    model = GPTModel(config, ProcessGroupCollection.single(), storage=Storage(initialize=False))
    try:
        chunks = weight_chunks(model.store)
        load_checkpoint(checkpoint, chunks, convert_dtype=True)
    except CheckpointError as error:
        raise ValueError(str(error)) from error
    fields = read_object(folder / CONFIG, follow_links=True)
    if fields.get("model_type") == KIMI_K2.model_type:  # which transformers has by one name only
        renamed = {**fields, "model_type": DEEPSEEK_V3.model_type}
        described = transformers.DeepseekV3Config.from_dict(renamed)
    else:
        described = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
    if described.model_type == NEMOTRON_H.model_type:
        # Up to 5.23 this is taken for the floor of dt, which is the limit's least.
        described.time_step_min = described.time_step_limit[0]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        str(folder),
        config=described,
        dtype=torch.float32,
        local_files_only=True,
        use_safetensors=True,
        experts_implementation="eager",  # the others want sizes that divide
    ).eval()
    tokens = _tokens(config.vocab_size)
    with torch.no_grad():
        ours = [chunk.tensor for chunk in chunks if chunk.name not in model.store.states]
        for weight in (*ours, *theirs.parameters()):
            weight.copy_(weight.to(dtype or weight.dtype))
        expected = theirs(tokens, use_cache=False).logits  # [b, s, v]
        found = model.full_logits(tokens).transpose(0, 1)  # [b, s, v]
    most, largest = float((found - expected).abs().max()), float(expected.abs().max())
    difference = LogitDifference(most, largest)
    if not most <= TOLERANCE * largest:
        raise ValueError(
            f"the logits of {checkpoint} and of {folder} in transformers differ by up to "
            f"{difference}: allowed is {TOLERANCE:g} of that: do not use one for the other"
        )
    return difference


def _tokens(vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    shape: Sequence[int] = (ROWS, MAX_TOKENS)
    return torch.randint(vocab_size, shape, generator=generator)
