# SPDX-License-Identifier: Apache-2.0
"""The dtype of bf16 and fp16 matrix products on a CPU, chosen once for all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from megatron.core.dist_checkpointing import Coordinator
from megatron.core.ops.backend_choice import cpu_bf16_speedup, measured_matmul_dtype

FLAG = "--cpu-matmul-dtype"


@dataclass(frozen=True, kw_only=True)
class CpuMatmul:
    """The dtype of a run's matrix products on a CPU.

    Args:
        dtype: dtype of the products: the weights' dtype, or fp32.
        weights: dtype of the weights.
        speedup: measured speed of bf16 over fp32 on the first rank; None for other weights.
        is_user_choice: whether an option set the dtype.
    """

    dtype: torch.dtype
    weights: torch.dtype
    speedup: float | None
    is_user_choice: bool

    @staticmethod
    def choose(
        mode: Literal["auto", "weights", "fp32"],
        *,
        weights: torch.dtype,
        device: torch.device,
        coordinator: Coordinator,
    ) -> CpuMatmul | None:
        """Choose the dtype for all ranks; every rank calls this. None if there is no choice.

        The first rank measures the speedup even if the user chose the dtype, to report its cost.

        Raises:
            ValueError: the user chose a dtype, and the device is a GPU.
        """
        if device.type != "cpu":
            if mode != "auto":
                raise ValueError(f"{FLAG} {mode} has no effect on a GPU: drop it")
            return None
        if weights not in (torch.bfloat16, torch.float16):
            return None
        is_rank_0 = coordinator.rank == 0

        def measure() -> tuple[bool, float | None]:
            if not is_rank_0:
                return False, None
            speedup = cpu_bf16_speedup() if weights == torch.bfloat16 else None
            return measured_matmul_dtype(weights) == weights, speedup

        coordinator.begin("choosing the dtype of products")
        uses_16_bit, speedup = coordinator.agree("cpu matmul", measure, lambda answers: answers[0])
        if mode != "auto":
            uses_16_bit = mode == "weights"
        dtype = weights if uses_16_bit else torch.float32
        return CpuMatmul(
            dtype=dtype, weights=weights, speedup=speedup, is_user_choice=mode != "auto"
        )

    @property
    def name(self) -> str:
        """The dtype's name as checkpoints store it."""
        return str(self.dtype).removeprefix("torch.")

    def line(self) -> str:
        """Return the choice and its reason for a run's log."""
        weights = str(self.weights).removeprefix("torch.")
        text = f"{weights} matrices are multiplied in {self.name} on this CPU"
        reasons = [f"as {FLAG} says"] if self.is_user_choice else []
        if self.speedup is not None:
            reasons.append(f"where bf16 runs at {self.speedup:.1f} x the speed of fp32")
        return ", ".join([text, *reasons])


def another_dtype(saved: str | None, now: str | None) -> str | None:
    """Return a line if a run resumes with another dtype than its checkpoint's, else None."""
    if saved is None or now is None or saved == now:
        return None
    flag = f"{FLAG} {'fp32' if saved == 'float32' else 'weights'}"
    return (
        f"its matrices were multiplied in {saved}, now they are in {now}: losses are not "
        f"bit-identical to an uninterrupted run; {flag} continues as before"
    )
