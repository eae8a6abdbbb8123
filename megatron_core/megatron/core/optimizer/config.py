# SPDX-License-Identifier: Apache-2.0
"""OptimizerConfig: what an optimizer does at every step, apart from the scheduled learning rate."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("adam", "sgd")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Settings of the update.

    Args:
        kind: "adam" (AdamW, decoupled weight decay) or "sgd" (with momentum).
        adam_beta1, adam_beta2, adam_eps: Adam's constants.
        sgd_momentum: SGD's momentum; 0 keeps no state.
        clip_grad: largest L2 norm of the whole gradient; 0 does not clip.
        count_zeros: count gradient elements that are exactly zero, at every step.

    Raises:
        ValueError: everything out of range, in one message.
    """

    kind: str = "adam"
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    sgd_momentum: float = 0.0
    clip_grad: float = 1.0
    count_zeros: bool = False

    def __post_init__(self) -> None:
        found = []
        if self.kind not in KINDS:
            found.append(f"optimizer {self.kind!r}: use one of {', '.join(KINDS)}")
        for name in ("adam_beta1", "adam_beta2", "sgd_momentum"):
            if not 0.0 <= getattr(self, name) < 1.0:
                found.append(f"{name} is {getattr(self, name)}: use 0 <= value < 1")
        if not self.adam_eps > 0.0:
            found.append(f"adam_eps is {self.adam_eps}: use a positive number")
        if not self.clip_grad >= 0.0:
            found.append(f"clip_grad is {self.clip_grad}: use 0 (no clipping) or a positive norm")
        if found:
            raise ValueError("; ".join(found))
