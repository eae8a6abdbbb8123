# SPDX-License-Identifier: Apache-2.0
"""Upcycle a dense checkpoint to a mixture of experts (Komatsuzaki et al. 2022, arXiv 2212.05055).

    python -m megatron.training.upcycle --load runs/dense --save runs/moe --num-experts 8
    torchrun ... -m megatron.training.pretrain_gpt --load runs/moe --num-experts 8 ...

Every expert of a layer starts as a copy of the layer's MLP, and the router with initial values. A
token's routing weights sum to 1, so the model initially computes the same function as the dense
one. One process, which streams: memory does not grow with the model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron.cli.errors import run_entry_point
from megatron.cli.flags import parse_command_line
from megatron.cli.standard_streams import run_command
from megatron.training.config.layer_pattern_options import read_frequency, write_frequency
from megatron.training.config.values import not_negative, positive, require, require_all

if TYPE_CHECKING:
    import torch

    from megatron.core.dist_checkpointing import CheckpointReader, TensorChunk
    from megatron.core.models.gpt import GPTConfig

PROG = "python -m megatron.training.upcycle"
_EXPERTS, _MLP, _ROUTER = ".moe.experts.", ".mlp.", ".moe.router.weight"


@dataclass(frozen=True, kw_only=True)
class UpcycleConfig:
    """Upcycle a dense checkpoint to a mixture of experts."""

    load: str
    """Folder of checkpoints of a dense model (the latest is used), or one iter_ folder."""
    save: str
    """Folder of checkpoints in which to write iter_0000000."""
    num_experts: int
    """Number of experts per MoE layer, each a copy of the layer's MLP."""
    moe_layer_freq: str | None = None
    """Which layers get experts: N for every N-th layer, starting with the first, or a 1 or 0 for
    each layer as 0,1,1 or [0]*1+[1]*2; None = all layers."""
    moe_router_topk: int = 2
    """Number of experts that each token is routed to."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Score function of the router's logits: softmax over all experts, or a sigmoid per expert."""
    seed: int = 1234
    """Seed of the routers' initial values."""

    def __post_init__(self) -> None:
        require_all(
            lambda: positive(self, "num_experts"),
            lambda: not_negative(self, "seed"),
            lambda: require(
                2 <= self.moe_router_topk <= max(2, self.num_experts),
                f"--moe-router-topk {self.moe_router_topk}: use 2 … {self.num_experts}: a "
                "single expert always has the weight 1, so the router gets no gradient",
            ),
        )


def with_experts(dense: GPTConfig, config: UpcycleConfig) -> GPTConfig:
    """Return the model config with experts. Raises ValueError if the model cannot have experts."""
    from megatron.core.moe import MoEConfig, RouterConfig
    from megatron.core.transformer.mlp import activation_settings

    where = f"--load {config.load}"
    if dense.moe is not None:
        raise ValueError(f"{where} has experts already: name a dense model")
    if dense.mlp.bias:
        raise ValueError(
            f"{where}: its MLPs have biases, which are not copied to experts: train a model with "
            "--disable-bias-linear"
        )
    if (dense.multipliers.mlp, dense.mlp.gate_multiplier) != (1.0, 1.0):
        raise ValueError(
            f"{where}: its MLPs have factors, which experts do not have: train a model without "
            "--mlp-output-multiplier and --mlp-gate-multiplier"
        )
    pattern = ""
    if config.moe_layer_freq is not None:
        pattern = read_frequency(config.moe_layer_freq, dense.num_layers)
        if set(pattern) == {"-"}:
            raise ValueError(f"--moe-layer-freq {config.moe_layer_freq}: no layer gets experts")
    router = RouterConfig(
        topk=config.moe_router_topk, score_function=config.moe_router_score_function
    )
    moe = MoEConfig(
        num_experts=config.num_experts,
        ffn_hidden_size=dense.mlp.ffn_hidden_size,
        router=router,
        **activation_settings(dense.mlp),
    )
    experts_config = replace(dense, moe=moe, ffn_pattern=pattern)
    if problems := experts_config.problems():
        raise ValueError("; ".join(problems))
    return experts_config


def upcycle(config: UpcycleConfig) -> Path:
    """Write the checkpoint with experts and return its folder.

    Raises:
        ValueError: the dense checkpoint is damaged or cannot have experts, or writing fails.
    """
    from megatron.core.dist_checkpointing import (
        CheckpointReader,
        Solo,
        list_checkpoints,
        save_checkpoint,
    )
    from megatron.core.models.gpt import logical_weights
    from megatron.training.checkpointing.find import load_newest
    from megatron.training.checkpointing.stored_model import stored_model

    # Other checkpoints are rejected too: a run would resume from the new one instead of its latest.
    if checkpoints := list_checkpoints(config.save):
        raise ValueError(
            f"--save {config.save} already contains {checkpoints[0].name}: name another folder"
        )

    def convert(source: Path) -> Path:
        with CheckpointReader(source) as reader:
            dense_extra = reader.manifest.extra
            model = with_experts(stored_model(source, reader.manifest), config)
            chunks = [
                _chunk(reader, name, shape, model=model, seed=config.seed)
                for name, shape in logical_weights(model).items()
            ]
            extra = _extra(dense_extra, model, config)
            return save_checkpoint(Path(config.save), 0, chunks, extra, coordinator=Solo())

    try:
        converted = load_newest(config.load, convert, Solo())
    except OSError as error:
        raise ValueError(f"--save {config.save}: {error}") from error
    if converted is None:
        raise ValueError(f"--load {config.load}: there is no checkpoint: name another folder")
    return converted[1]


def _extra(dense: Mapping[str, Any], model: GPTConfig, config: UpcycleConfig) -> dict[str, Any]:
    """Return the checkpoint's `extra`: the dense checkpoint's, without progress."""
    assert model.moe is not None
    options = {
        "num-experts": config.num_experts,
        "moe-layer-freq": write_frequency(model.ffn_pattern),
        "moe-ffn-hidden-size": model.moe.ffn_hidden_size,
        "moe-router-topk": config.moe_router_topk,
        "moe-router-score-function": config.moe_router_score_function,
    }
    return {
        "format": dense["format"],
        "model": model.to_json(),
        "config": {**dense["config"], **options},
        "tokenizer": dense.get("tokenizer", {}),
        "weights_only": True,
    }


def _chunk(
    reader: CheckpointReader,
    name: str,
    shape: tuple[int, ...],
    *,
    model: GPTConfig,
    seed: int,
) -> TensorChunk:
    """Return the chunk of a tensor whose values are computed when it is written."""
    import torch

    from megatron.core.dist_checkpointing import CheckpointError, TensorChunk
    from megatron.core.dist_checkpointing.safetensors_file import DTYPES

    # A router has the dtype of its block's norm, which is the model's dtype.
    norm = ".post_norm.weight" if model.norm.placement == "post" else ".norm.weight"
    source = name.replace(_EXPERTS, _MLP).replace(_ROUTER, norm)
    stored = reader.manifest.tensors.get(source)
    if stored is None:
        raise CheckpointError(f"it lacks {source}")
    dtype = DTYPES[stored.dtype]
    if name.endswith(_ROUTER):
        read_blocks = partial(_initial, name, shape, dtype=dtype, std=model.init_std, seed=seed)
    elif _EXPERTS in name:
        read_blocks = partial(_copies, reader, source, shape[1:], dtype=dtype, times=shape[0])
    else:
        read_blocks = partial(_copies, reader, source, shape, dtype=dtype, times=1)
    return TensorChunk(
        name=name,
        shape=shape,
        offsets=(0,) * len(shape),
        tensor=torch.empty(shape, dtype=dtype, device="meta"),
        replica_ranks=(0,),
        byte_stream=read_blocks,
    )


def _copies(
    reader: CheckpointReader, name: str, shape: tuple[int, ...], *, dtype: torch.dtype, times: int
) -> Iterator[memoryview]:
    """Yield the bytes of a stored tensor `times` times, in blocks of rows."""
    import torch

    from megatron.core.boxes import row_boxes
    from megatron.core.dist_checkpointing import TensorChunk
    from megatron.core.dist_checkpointing.safetensors_file import as_bytes

    for _ in range(times):
        for box in row_boxes(shape, dtype.itemsize, box_bytes=reader.manifest.block_bytes):
            block = torch.empty(box.sizes, dtype=dtype)
            where = {"shape": shape, "offsets": box.offsets, "replica_ranks": (0,)}
            reader.read([TensorChunk(name=name, tensor=block, **where)])
            yield as_bytes(block)


def _initial(
    name: str, shape: tuple[int, ...], *, dtype: torch.dtype, std: float, seed: int
) -> Iterator[memoryview]:
    """Yield the bytes of a weight's initial values, in blocks of rows."""
    import torch

    from megatron.core.boxes import row_boxes
    from megatron.core.dist_checkpointing.safetensors_file import as_bytes
    from megatron.core.initialize import InitSpec, fill_

    for box in row_boxes(shape, dtype.itemsize):
        values = torch.empty(box.sizes, dtype=dtype)
        fill_(values, InitSpec.normal(std), seed=seed, name=name, shape=shape, offsets=box.offsets)
        yield as_bytes(values)


def run(argv: Sequence[str]) -> None:
    """Carry out the command. Raises ValueError."""
    line = parse_command_line(
        UpcycleConfig, argv, prog=PROG, description="Upcycle a dense checkpoint to experts."
    )
    config: UpcycleConfig = line.config
    print(f"upcycled {config.load} as {upcycle(config)}", flush=True)


def main(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the command and return its exit code."""
    return run_entry_point(lambda: run(argv), prog=PROG)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:], os.environ))
