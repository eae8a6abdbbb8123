# SPDX-License-Identifier: Apache-2.0
"""Steps that must not change the weights: what a spike of the loss is, and steps in words.

Every rank calls these functions with the same numbers and comes to the same decisions.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from megatron.training.config import Config
from megatron.training.failures.replay import Doubt


def spike_limit(config: Config, recent_losses: Sequence[float]) -> float:
    """Return the loss above which a step is skipped; Inf before half a window of losses is known.

    The median, because a mean would follow a slow divergence into it.
    """
    factor, window = config.failures.loss_spike_factor, config.failures.loss_spike_window
    if factor is None or len(recent_losses) < max(1, window // 2):
        return math.inf
    return factor * statistics.median(recent_losses)


def remember_loss(config: Config, recent_losses: list[float], loss: float) -> None:
    """Add the loss of an applied step to those that tell a spike, where they are used."""
    if config.failures.loss_spike_factor is not None:
        recent_losses.append(loss)
        del recent_losses[: -config.failures.loss_spike_window]


def doubt_text(
    iteration: int, doubt: Doubt, where: str, *, limit: float, stops: bool = False
) -> str:
    """Say what was wrong with a step and what came of it.

    Args:
        where: the ranks and their machines, in words.
        limit: of the loss.
        stops: whether the run ends here; otherwise it skips a step that it cannot use.
    """
    what = {
        "nan": "NaN or Inf loss",
        "inf_norm": "NaN or Inf gradient norm",
        "spike": f"loss {doubt.values[0]:.4g} is above {limit:.4g}, the limit of "
        "--loss-spike-factor, with a part",
        "determinism": "one of three computations of the step has other bits: that",
    }[doubt.kind]
    again = "gives it again" + ("" if doubt.same else ", with other bits")
    end = {
        "transient": "the step computed once more is sound and was used: transient, watch that "
        "machine",
        "reproduced": f"the step computed once more {again}: reproduced"
        + ("" if stops else ", the step was skipped"),
        "unchecked": "the step was skipped",
        "undecided": "no two of three computations are equal, the last one was used: undecided; "
        "--deterministic-mode leaves out kernels that add in a changing order",
    }[doubt.verdict]
    if doubt.kind == "determinism" and doubt.verdict == "transient":
        end = "the two others are equal and were used: transient, watch that machine"
    elif doubt.verdict == "undecided":
        what = "the result of the step changes with every computation, that"
    return f"iteration {iteration}: {what} {where}; {end}"


def where_text(hosts: Mapping[int, str]) -> str:
    """Name ranks with their machines."""
    shown = ", ".join(f"rank {rank} on {host}" for rank, host in list(hosts.items())[:8])
    shown += f" and {len(hosts) - 8} more" if len(hosts) > 8 else ""
    return f"of {shown}"
