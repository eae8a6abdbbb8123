# SPDX-License-Identifier: Apache-2.0
"""A model that is loaded for generation, with its tokenizer."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from megatron.cli.tokenizers import (
    Tokenizer,
)
from megatron.core.comm.symmetric_memory import Mode, SequenceParallelComm, TorchMemory
from megatron.core.device import available_memory_bytes
from megatron.core.dist_checkpointing import (
    Coordinator,
    Solo,
)
from megatron.core.inference.model_runner import LanguageModel
from megatron.core.inference.stages import PipelineGroups
from megatron.core.models.gpt import GPTModel
from megatron.core.models.inference_optimized import InferenceOptimizedModel, matrices
from megatron.core.ops.matmul.batch_invariant import TILE_ROWS, check_tile_invariance
from megatron.core.ops.matmul.low_bit import CopyDtype
from megatron.core.ops.matmul.onednn import is_available
from megatron.core.ops.tiled_attention import KEY_TILE
from megatron.core.process_groups import Group
from megatron.core.weight_gather import copy_weights
from megatron.inference.config import Speculation


@dataclass(frozen=True, kw_only=True)
class CheckpointModel:
    """A model that is loaded for generation, with its tokenizer.

    Args:
        model: this rank's shard of the model.
        tokenizer: the tokenizer of training, or the one of `--tokenizer-model`.
        max_length: longest sequence in tokens; None if the checkpoint does not specify it.
        vocab_size: size of the vocabulary; every token id is below it.
        device: device of the weights.
        folder: the `iter_` or Hugging Face folder that was loaded.
        stop_tokens: ids of the tokens that end a text.
        hf_folder: the Hugging Face folder of the model, or the one that it was imported from; None
            without one.
        chat_folder: the tokenizer's folder, which may hold a chat template; None without a folder.
        token_multiple: the number of tokens of a step is padded to a multiple of this.
        optimized: run `InferenceOptimizedModel` instead of the layers that train.
        nvls, nvls_tries, weights_dtype: as in `ModelSource`.
        speculation: options of speculative decoding. The MTP layers are loaded only for method mtp.
        draft: the draft model, which is whole on the first pipeline stage; None on other stages and
            without a draft model.
        tokenizer_choice: arguments of `choose_tokenizer` that build the same tokenizer in another
            process.
        coordinator: reaches agreement between all ranks.
        timeout_seconds: how long a rank waits for another rank.
    """

    model: GPTModel
    tokenizer: Tokenizer
    max_length: int | None
    vocab_size: int
    device: torch.device
    folder: Path
    stop_tokens: frozenset[int]
    hf_folder: Path | None = None
    chat_folder: str | Path | None = None
    token_multiple: int = 1
    optimized: bool = False
    nvls: Mode = "auto"
    nvls_tries: int | None = None
    weights_dtype: CopyDtype | Literal["auto", "stored"] = "stored"
    speculation: Speculation = field(default_factory=Speculation)
    draft: CheckpointModel | None = None
    tokenizer_choice: Mapping[str, Any] = field(default_factory=dict)
    coordinator: Coordinator = field(default_factory=Solo)
    timeout_seconds: float = 600.0

    def generator(self, max_num_batched_tokens: int) -> LanguageModel:
        """Return the model that the engine runs; all ranks call it.

        Args:
            max_num_batched_tokens: most tokens of a step.

        Raises:
            ValueError: `--nvls require` without NVLink SHARP, or `--weights-dtype` if no weight
                can be copied.
        """
        if self.copy_dtype is not None:
            report = copy_weights(matrices(self.model), self.copy_dtype)
            if self.model.region.group.rank == 0:
                print(report, file=sys.stderr)
        if self.model.store.row_tiles:
            self._check_tile_invariance()
        if not self.optimized:
            return self.model
        return InferenceOptimizedModel(self.model, self._comm(max_num_batched_tokens))

    @cached_property
    def copy_dtype(self) -> CopyDtype | None:
        """Dtype of the copies of the weights, see `ModelSource.weights_dtype`; None for none."""
        if self.weights_dtype != "auto":
            return None if self.weights_dtype == "stored" else self.weights_dtype
        handles = matrices(self.model) if self.optimized else []
        if not handles or not all(handle.packs_bf16() for handle in handles):
            return None
        nbytes, available = sum(handle.get().nbytes for handle in handles), available_memory_bytes()
        # The ranks of a machine share its memory, and the cache of the engine needs some of it.
        if available is None or 2 * nbytes * self.model.groups["world"].size <= available:
            return "bf16"
        if self.model.groups["world"].rank == 0:
            print(
                f"--weights-dtype auto: packed copies of the weights need {nbytes / 1e6:,.1f} MB "
                f"a rank, over half of the available {available / 1e6:,.1f} MB; products use the "
                "stored weights",
                file=sys.stderr,
            )
        return None

    def _check_tile_invariance(self) -> None:
        """Log which matmuls --batch-invariant covers. Raises ValueError if a tile is not exact."""
        # The product of an int8 copy sums every row in the same order.
        handles = [handle for handle in matrices(self.model) if handle.copy is None]
        packed = [handle for handle in handles if handle.min_invariant_rows() is not None]
        tiled = [handle for handle in handles if handle not in packed]
        if tiled:
            check_tile_invariance((handle.get() for handle in tiled), tiled[0].product_dtype)
        nbytes = sum(handle.packed().nbytes for handle in packed)
        if self.model.region.group.rank == 0:
            fallback = f"{len(tiled)} matrices, " if tiled else ""
            print(
                f"batch-invariant: {len(packed)} matrices packed by oneDNN, {nbytes / 1e6:,.1f} MB "
                f"next to those stored; {fallback}routers and experts by tiles of {TILE_ROWS} "
                f"tokens, attention by tiles of {KEY_TILE} keys, recurrences token by token",
                file=sys.stderr,
            )
            if tiled:
                varying_order = "computes sums whose order depends on the number of rows"
                reason = varying_order if is_available() else "is not available"
                shapes = ", ".join(str(list(s)) for s in sorted({h.shape for h in tiled}))
                print(
                    f"batch-invariant: tiles of {shapes}, because the packed product of this "
                    f"torch {reason}",
                    file=sys.stderr,
                )

    def _comm(self, max_num_batched_tokens: int) -> SequenceParallelComm | None:
        """Return the collectives of sequence parallelism; None without it."""
        region = self.model.region
        if not region.scatters:
            return None
        tokens = -(-max_num_batched_tokens // self.token_multiple) * self.token_multiple
        element_size = torch.empty((), dtype=self.model.store.dtype).element_size()
        comm = SequenceParallelComm.create(
            region.group,
            TorchMemory(self.device),
            max_bytes=tokens * self.model.config.hidden_size * element_size,
            mode=self.nvls,
            limit=self.nvls_tries or 0,
        )
        if region.group.rank == 0:
            print(f"sequence parallel collectives: {comm.explain()}", file=sys.stderr)
            if self.nvls_tries is not None and comm.way == "torch.distributed":
                print(
                    "--nvls-tries has no effect on torch.distributed, whose waits "
                    "--distributed-timeout-minutes bounds",
                    file=sys.stderr,
                )
        return comm

    @property
    def data_parallel(self) -> Group:
        """The data-parallel group: one rank of each replica, with the same shard of the model."""
        return self.model.groups["dp"]

    @property
    def shares_experts(self) -> bool:
        """Whether the experts are sharded over several replicas (the group "etp_ep")."""
        groups = self.model.groups
        within_replica = set(groups["etp_ep"].ranks) <= set(groups["tp"].ranks)
        return self.model.config.moe is not None and not within_replica

    def host_group(self, name: str = "world") -> Group:
        """Create a group for messages between hosts; all ranks call this.

        See `ProcessGroupCollection.host_group`.
        """
        return self.model.groups.host_group(name, timeout_seconds=self.timeout_seconds)

    @property
    def pipeline(self) -> PipelineGroups:
        """The pipeline groups of this rank."""
        return PipelineGroups.from_groups(self.model.groups)
