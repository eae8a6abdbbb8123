# SPDX-License-Identifier: Apache-2.0
"""The state of delayed scaling, independent of TransformerEngine.

Delayed scaling quantizes x to x · scale, with a scale from the largest magnitudes (amax) of
earlier steps (Micikevicius et al. 2022, section 3):

    scale = (largest number of the format / amax over the history) / 2^margin

The amax is collected over all microbatches of a step, and reduced over all ranks of a pipeline
stage at the end of the step. All microbatches of a step therefore have the same scales: a recompute
in backward uses the forward's scales, and scales do not depend on the split of a batch.
"""

from __future__ import annotations

import torch

from megatron.core.comm.collectives import all_reduce
from megatron.core.extensions import QuantizationConfig
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.weight_gather import WeightStore

E4M3_MAX, E5M2_MAX = 448.0, 57344.0

#: The tensors of a linear layer that are quantized, in the order of its scales.
QUANTIZED_TENSORS = ("input", "weight", "output_gradient")


class DelayedScales:
    """Scales and amax of the tensors of one weight's matmuls.

    Attributes:
        scale: fp32 [3], of `QUANTIZED_TENSORS`; a state of the model.
        history: fp32 [steps, 3], amax of past steps, the most recent first; also a state.
        amax: fp32 [3], of this step so far.
    """

    def __init__(self, name: str, steps: int, *, store: WeightStore) -> None:
        count = len(QUANTIZED_TENSORS)
        self.scale = store.declare_state(f"{name}.fp8_scale", (count,), initial=1.0, optional=True)
        history = f"{name}.fp8_amax_history"
        self.history = store.declare_state(history, (steps, count), optional=True)
        self.amax = torch.zeros_like(self.scale)


class DelayedScaling:
    """The scales of all weights of a model, updated once per step.

    A model's `Backend` has one. It is empty with stateless recipes.
    """

    def __init__(self, config: QuantizationConfig) -> None:
        self.config = config
        self.scales: list[DelayedScales] = []

    def scales_of(self, name: str, *, store: WeightStore) -> DelayedScales:
        """Declare the scales of a weight's matmuls."""
        scales = DelayedScales(name, self.config.amax_history_len, store=store)
        self.scales.append(scales)
        return scales

    def begin(self) -> None:
        """Start a step: reset the amax, which an evaluation or a failed step may have changed."""
        if self.scales:
            torch._foreach_zero_([scales.amax for scales in self.scales])

    @torch.no_grad()
    def finish(self, groups: ProcessGroupCollection) -> None:
        """Finish a step: compute the next step's scales from the amax of all ranks of the stage.

        An amax that is not finite, from a step whose loss overflowed, does not enter the history.
        """
        if not self.scales:
            return
        amax = torch.stack([scales.amax for scales in self.scales])  # [n, 3]
        for name in ("tp", "dense_dp"):
            all_reduce(amax, groups[name], op="max", out=amax)
        amax = torch.where(torch.isfinite(amax), amax, 0.0)
        histories = [scales.history for scales in self.scales]
        previous = torch.stack(histories)  # [n, steps, 3]
        history = torch.cat((amax.unsqueeze(1), previous[:, :-1]), 1)
        current = [scales.scale for scales in self.scales]
        scale = self._scale(history, torch.stack(current))
        torch._foreach_copy_(histories, list(history))
        torch._foreach_copy_(current, list(scale))
        self.begin()

    def _scale(self, history: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Return scales [n, 3] from histories [n, steps, 3]; without an amax the previous scale."""
        amax = history.amax(1) if self.config.amax_compute_algo == "max" else history[:, 0]
        gradient_max = E5M2_MAX if self.config.hybrid else E4M3_MAX
        max_values = amax.new_tensor([E4M3_MAX, E4M3_MAX, gradient_max])
        scale = (max_values / amax) / 2.0**self.config.margin
        scale = scale.clamp(max=torch.finfo(torch.float32).max)
        return torch.where(amax > 0.0, scale, previous)
