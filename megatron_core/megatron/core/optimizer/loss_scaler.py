# SPDX-License-Identifier: Apache-2.0
"""Loss scaling, which keeps fp16 gradients in range: constant or dynamic.

The loss is multiplied by `scale` before backward, and the gradients are divided by it before the
update. bf16 and fp32 have a sufficient range and use `ConstantLossScaler(1.0)`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


class LossScaler(Protocol):
    """Interface of loss scalers."""

    @property
    def scale(self) -> float:
        """The factor on the next loss."""
        ...

    @property
    def seeks(self) -> bool:
        """Whether an overflow may only mean that the scale is too large."""
        ...

    def update(self, found_inf: bool) -> None:
        """Record one step; `found_inf` means that some rank had a non-finite gradient."""

    def scalars(self) -> dict[str, torch.Tensor]:
        """Return the state by name: tensors [] in host memory, which are the state itself."""
        ...

    def state_dict(self) -> dict[str, float]:
        """Return the state as JSON-serializable numbers."""
        ...

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a saved state. Raises ValueError if another kind of scaler saved it."""


@dataclass(frozen=True)
class ConstantLossScaler:
    """A constant loss scale.

    Raises:
        ValueError: the scale is not positive and finite.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.scale < math.inf:
            raise ValueError(f"loss scale is {self.scale}: use a positive finite number")

    @property
    def seeks(self) -> bool:
        """False: this scale cannot be lowered."""
        return False

    def update(self, found_inf: bool) -> None:
        """Do nothing: a constant scale has no state."""

    def scalars(self) -> dict[str, torch.Tensor]:
        """Return nothing: the current setting overrides a saved one."""
        return {}

    def state_dict(self) -> dict[str, float]:
        """Return the scale, so that a resumed run can be compared with it."""
        return {"scale": self.scale}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Check that the saved scaler was constant too; the current setting overrides its scale."""
        _check_keys(state, {"scale"})


@dataclass(frozen=True, kw_only=True)
class DynamicLossScalerConfig:
    """Settings of dynamic loss scaling (Micikevicius et al. 2018, "Mixed precision training").

    Args:
        initial_scale: initial scale; deliberately too large, so that the first steps are skipped.
        min_scale: lower bound of the scale.
        growth_factor: factor on the scale after `growth_interval` steps without overflow.
        growth_interval: number of consecutive steps without overflow before the scale grows.
        backoff_factor: factor on the scale at an overflow, from the `hysteresis`-th one on.
        hysteresis: number of overflows before the scale is lowered; an interval without overflow
            resets the count.

    Raises:
        ValueError: lists all invalid combinations of settings.
    """

    initial_scale: float = 2.0**32
    min_scale: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2

    def __post_init__(self) -> None:
        problems = []
        if not 0.0 < self.min_scale <= self.initial_scale < math.inf:
            problems.append(
                f"loss scale starts at {self.initial_scale} with minimum {self.min_scale}: "
                f"use 0 < minimum <= start"
            )
        if not self.growth_factor > 1.0:
            problems.append(f"growth factor is {self.growth_factor}: use more than 1")
        if not 0.0 < self.backoff_factor < 1.0:
            problems.append(f"backoff factor is {self.backoff_factor}: use one between 0 and 1")
        if self.growth_interval < 1 or self.hysteresis < 1:
            problems.append(
                f"growth interval is {self.growth_interval}, hysteresis {self.hysteresis}: "
                f"use at least 1"
            )
        if problems:
            raise ValueError("; ".join(problems))


class DynamicLossScaler:
    """Dynamic loss scaling: searches for the largest scale without overflow.

    Every rank must pass the same `found_inf`, or their scales diverge.
    """

    def __init__(self, config: DynamicLossScalerConfig | None = None) -> None:
        self.config = DynamicLossScalerConfig() if config is None else config
        # fp64, to match Python floats
        self._scale = torch.tensor(self.config.initial_scale, dtype=torch.float64, device="cpu")
        self._good_steps = torch.zeros((), dtype=torch.int64, device="cpu")
        self._overflows_left = torch.tensor(self.config.hysteresis, dtype=torch.int64, device="cpu")

    @property
    def scale(self) -> float:
        """The factor on the next loss."""
        return float(self._scale)

    @property
    def seeks(self) -> bool:
        """Whether the scale can still be lowered."""
        return self.scale > self.config.min_scale

    def update(self, found_inf: bool) -> None:
        """Record one step; `found_inf` means that some rank had a non-finite gradient."""
        config = self.config
        if found_inf:
            self._good_steps.fill_(0)
            self._overflows_left.sub_(1).clamp_(min=0)
            if int(self._overflows_left) == 0:
                self._scale.mul_(config.backoff_factor).clamp_(min=config.min_scale)
            return
        self._good_steps.add_(1)
        if int(self._good_steps) == config.growth_interval:
            self._good_steps.fill_(0)
            self._overflows_left.fill_(config.hysteresis)
            self._scale.mul_(config.growth_factor)

    def scalars(self) -> dict[str, torch.Tensor]:
        """Return the state by name: tensors [] in host memory, which are the state itself."""
        return {
            "loss_scale": self._scale,
            "loss_scale_good_steps": self._good_steps,
            "loss_scale_overflows_left": self._overflows_left,
        }

    def state_dict(self) -> dict[str, float]:
        """Return the state as JSON-serializable numbers."""
        return {
            "scale": self.scale,
            "good_steps": int(self._good_steps),
            "overflows_left": int(self._overflows_left),
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a saved state. Raises ValueError if another kind of scaler saved it."""
        _check_keys(state, set(self.state_dict()))
        self._scale.fill_(float(state["scale"]))
        self._good_steps.fill_(int(state["good_steps"]))
        self._overflows_left.fill_(int(state["overflows_left"]))


def _check_keys(state: Mapping[str, float], expected_keys: set[str]) -> None:
    """Raise ValueError if another kind of scaler wrote a saved state."""
    if set(state) != expected_keys:
        raise ValueError(
            f"the saved loss scaler contains {sorted(state)}, but this run needs "
            f"{sorted(expected_keys)}: resume with the original loss scaling options"
        )
