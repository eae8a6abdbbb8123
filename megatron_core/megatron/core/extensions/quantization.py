# SPDX-License-Identifier: Apache-2.0
"""Which layers multiply in FP8 or FP4, how, and the state of delayed scaling; imports no library.

Delayed scaling quantizes x to x · scale, with a scale from the largest magnitudes (amax) of
earlier steps (Micikevicius et al. 2022, section 3):

    scale = (largest number of the format / amax over the history) / 2^margin

Amax is gathered over all microbatches of a step, and reduced over all ranks of a pipeline stage
when the step ends. So all microbatches of a step have the same scales, which a recompute in
backward meets again, and which do not depend on how a batch is divided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from megatron.core.comm.collectives import all_reduce
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.weight_gather import WeightStore

E4M3_MAX, E5M2_MAX = 448.0, 57344.0

#: Of what each recipe needs the sizes of a weight on a rank to be multiples, and its rows of
#: activations: of FP8 products, of blocks that share a scale.
MULTIPLES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "delayed": (16, 8),
        "tensorwise": (16, 8),
        "blockwise": (16, 8),
        "mxfp8": (32, 32),
        "nvfp4": (32, 16),
    }
)

#: The format in which a gathered weight (`weight_gather.wire`) is what a recipe multiplies. A scale
#: of earlier steps is none of it, nor is one of 128 elements.
GATHERED: Mapping[str, str] = MappingProxyType(
    {"tensorwise": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
)


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """A recipe, and the layers that keep the dtype of the weights.

    Args:
        recipe: where scales come from: earlier steps (delayed), the tensor (tensorwise), its blocks
            of 128 (blockwise) or 32 (mxfp8) elements; nvfp4 has FP4 elements in blocks of 16.
        hybrid: output gradients are E5M2; everything else, and otherwise they as well, is E4M3.
        margin: delayed scaling leaves room for 2^margin times the amax.
        amax_history_len: steps that delayed scaling looks back on.
        amax_compute_algo: the largest amax of the history, or the last one.
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
        """What both sizes of a weight are multiples of, on a rank."""
        return MULTIPLES[self.recipe][0]

    @property
    def row_multiple(self) -> int:
        """What the number of rows of activations is a multiple of, on a rank."""
        return MULTIPLES[self.recipe][1]

    def covers(self, layer: int, num_layers: int) -> bool:
        """Whether layer `layer` of `num_layers` is quantized."""
        return self.num_layers_at_start <= layer < num_layers - self.num_layers_at_end

    def check_weight(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ValueError if a weight [..., o, h] of a rank cannot be quantized."""
        multiple = self.weight_multiple
        if any(size % multiple for size in shape[-2:]):
            raise ValueError(
                f"{name} is {list(shape)} on a rank, and {self.recipe} needs multiples of "
                f"{multiple}: change the size, or lower the tensor parallel size"
            )


#: The tensors of a linear layer that are quantized, in the order of its scales.
QUANTIZED_TENSORS = ("input", "weight", "output_gradient")


class DelayedScales:
    """Of one weight's products: what its tensors are multiplied by, and their amax.

    Attributes:
        scale: fp32 [3], of `QUANTIZED_TENSORS`; a state of the model.
        history: fp32 [steps, 3], the amax of finished steps, the last one first; a state as well.
        amax: fp32 [3], of this step so far.
    """

    def __init__(self, name: str, steps: int, *, store: WeightStore) -> None:
        count = len(QUANTIZED_TENSORS)
        self.scale = store.declare_state(f"{name}.fp8_scale", (count,), initial=1.0, optional=True)
        history = f"{name}.fp8_amax_history"
        self.history = store.declare_state(history, (steps, count), optional=True)
        self.amax = torch.zeros_like(self.scale)


class DelayedScaling:
    """The scales of all weights of a model, updated once a step.

    A model's `Backend` has one. It is empty with recipes that have no state.
    """

    def __init__(self, config: QuantizationConfig) -> None:
        self.config = config
        self.scales: list[DelayedScales] = []

    def scales_of(self, name: str, *, store: WeightStore) -> DelayedScales:
        """Declare the scales of a weight's products."""
        made = DelayedScales(name, self.config.amax_history_len, store=store)
        self.scales.append(made)
        return made

    def begin(self) -> None:
        """Begin a step: forget what an evaluation has left."""
        for scales in self.scales:
            scales.amax.zero_()

    @torch.no_grad()
    def finish(self, groups: ProcessGroupCollection) -> None:
        """End a step: make the scales of the next from what all ranks of the stage have seen.

        An amax that is not finite, of a step whose loss has overflowed, is not remembered.
        """
        if not self.scales:
            return
        amax = torch.stack([scales.amax for scales in self.scales])  # [n, 3]
        for name in ("tp", "lanes"):
            all_reduce(amax, groups[name], op="max", out=amax)
        amax = torch.where(torch.isfinite(amax), amax, 0.0)
        histories = [scales.history for scales in self.scales]
        before = torch.stack(histories)  # [n, steps, 3]
        history = torch.cat((amax.unsqueeze(1), before[:, :-1]), 1)
        current = [scales.scale for scales in self.scales]
        scale = self._scale(history, torch.stack(current))
        torch._foreach_copy_(histories, list(history))
        torch._foreach_copy_(current, list(scale))
        self.begin()

    def _scale(self, history: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Return scales [n, 3] from histories [n, steps, 3]; as before where nothing is known."""
        amax = history.amax(1) if self.config.amax_compute_algo == "max" else history[:, 0]
        gradient = E5M2_MAX if self.config.hybrid else E4M3_MAX
        largest = amax.new_tensor([E4M3_MAX, E4M3_MAX, gradient])
        scale = (largest / amax) / 2.0**self.config.margin
        scale = scale.clamp(max=torch.finfo(torch.float32).max)
        return torch.where(amax > 0.0, scale, before)
