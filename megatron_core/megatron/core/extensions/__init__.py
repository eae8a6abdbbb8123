# SPDX-License-Identifier: Apache-2.0
"""Backends built from other libraries; each is a separate module that is imported on demand.

This module needs no library: it describes which layers multiply in FP8 or FP4, and how.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

#: The first release of TransformerEngine whose layers take weights that are gathered on demand.
OLDEST_TRANSFORMER_ENGINE = (2, 19)

#: For each recipe, the numbers that must divide both sizes of a weight on a rank, and its number of
#: rows of activations: sizes of FP8 matmuls and of blocks that share a scale.
MULTIPLES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "delayed": (16, 8),
        "tensorwise": (16, 8),
        "blockwise": (16, 8),
        "mxfp8": (32, 32),
        "nvfp4": (32, 16),
    }
)

#: Gather format (`weight_gather.gather_format`) whose bytes a recipe multiplies directly. There is
#: none for scales from earlier steps (delayed) or for blocks of 128 elements (blockwise).
GATHERED: Mapping[str, str] = MappingProxyType(
    {"tensorwise": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
)


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """A quantization recipe, and the layers that keep the dtype of the weights.

    Args:
        recipe: source of the scales: earlier steps (delayed), the tensor (tensorwise), its blocks
            of 128 (blockwise) or 32 (mxfp8) elements; nvfp4 has FP4 elements in blocks of 16.
        hybrid: output gradients are E5M2; otherwise all tensors are E4M3.
        margin: delayed scaling leaves headroom of 2^margin times the amax.
        amax_history_len: number of past steps in the amax history of delayed scaling.
        amax_compute_algo: the largest amax of the history, or the most recent one.
        num_layers_at_start, num_layers_at_end: first and last layers that are not quantized.
    """

    recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"]
    hybrid: bool = False
    margin: int = 0
    amax_history_len: int = 1
    amax_compute_algo: Literal["max", "most_recent"] = "most_recent"
    num_layers_at_start: int = 0
    num_layers_at_end: int = 0

    @property
    def weight_multiple(self) -> int:
        """Both sizes of a weight on a rank must be multiples of this."""
        return MULTIPLES[self.recipe][0]

    @property
    def row_multiple(self) -> int:
        """The number of rows of activations on a rank must be a multiple of this."""
        return MULTIPLES[self.recipe][1]

    def covers(self, layer: int, num_layers: int) -> bool:
        """Return whether layer `layer` of `num_layers` is quantized."""
        return self.num_layers_at_start <= layer < num_layers - self.num_layers_at_end

    def check_weight(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ValueError if a weight [..., o, h] of a rank cannot be quantized."""
        multiple = self.weight_multiple
        if any(size % multiple for size in shape[-2:]):
            raise ValueError(
                f"{name} is {list(shape)} on a rank, but {self.recipe} needs multiples of "
                f"{multiple}: change the size, or lower the tensor parallel size"
            )


def transformer_engine_problem() -> str | None:
    """Return why `extensions.transformer_engine` cannot be used, with the fix; None if it can.

    Imports the module, which takes seconds if TransformerEngine is installed.
    """
    needed = ".".join(map(str, OLDEST_TRANSFORMER_ENGINE))
    install = "pip install 'megatron-lm[te]'"
    try:
        release = importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return f"TransformerEngine is not installed: {install} (>= {needed})"
    numbers = tuple(int(number) for number in re.findall(r"\d+", release)[:2])
    if numbers < OLDEST_TRANSFORMER_ENGINE:
        return f"TransformerEngine {release} has no distributed weights: {install} (>= {needed})"
    try:
        importlib.import_module("megatron.core.extensions.transformer_engine")
        # TE looks for a GPU when a layer is built.
        importlib.import_module("transformer_engine.pytorch").Linear(16, 16, device="meta")
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        return f"TransformerEngine {release} cannot be used ({reason}): {install} on a GPU machine"
    return None
