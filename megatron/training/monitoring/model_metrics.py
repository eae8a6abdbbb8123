# SPDX-License-Identifier: Apache-2.0
"""What is logged of experts and of multi-token prediction.

What is logged about experts: how even their load is, what was dropped, how sure routers are.

What is logged about multi-token prediction: the mean loss of each depth.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import fmean

from megatron.core.models.gpt import GPTModel, take_mean_losses
from megatron.core.moe import MoEConfig
from megatron.core.moe.balance import Balance, RouterLoad
from megatron.training.hooks import TrainingHooks
from megatron.training.monitoring.log_line import LogPart
from megatron.training.monitoring.metrics import EXPERT_LOAD


class ModelLog(TrainingHooks):
    """Shows at log lines what parts of a model have counted.

    Args:
        model: may have depths of multi-token prediction.
        balance: sums the loads of its experts; None where there are none.
    """

    def __init__(self, model: GPTModel, balance: Balance | None) -> None:
        self._model, self._balance = model, balance

    def log_parts(self) -> list[LogPart]:
        """Return the losses of depths and the loads of experts; every rank calls this."""
        found = []
        if self._model.config.mtp_num_layers:
            found.append(mtp_losses(self._model))
        if self._balance is not None:
            found.append(load_balance(self._balance.report(), self._balance.config))
        return found


def mtp_losses(model: GPTModel) -> LogPart:
    """Return what a log line reports of the depths, counted from 1, since the line before.

    Every rank calls this.
    """
    losses = dict(enumerate(take_mean_losses(model), start=1))
    words = " | ".join(f"mtp {depth} loss: {loss:.6E}" for depth, loss in losses.items())
    return LogPart(words, {f"mtp_{depth}_loss": loss for depth, loss in losses.items()})


def load_balance(loads: Sequence[RouterLoad], config: MoEConfig) -> LogPart:
    """Return what a log line reports of the loads of all routers since the line before.

    Args:
        loads: of every router of the model, in its order.
        config: of the experts; what they do without is left out.
    """
    worst = max(loads, key=lambda load: load.imbalance)
    busiest = worst.tokens.index(max(worst.tokens))
    router = config.router
    numbers = {
        "expert_load_max": worst.imbalance,
        "router_entropy": fmean(load.entropy for load in loads),
    }
    words = [
        f"load balance: worst {worst.imbalance:.2f} ({layer_name(worst.name)}, expert {busiest})",
        f"router entropy {numbers['router_entropy']:.3f}",
    ]
    if config.capacity_factor is not None:
        numbers["tokens_dropped"] = fmean(load.dropped for load in loads)
        words.insert(1, f"dropped {numbers['tokens_dropped']:.2%}")
    if router.balance != "none":
        numbers["aux_loss"] = fmean(load.balance_loss for load in loads)
        words.append(f"aux loss {numbers['aux_loss']:.4f}")
    if router.z_loss_coeff > 0.0:
        numbers["z_loss"] = fmean(load.z_loss for load in loads)
        words.append(f"z loss {numbers['z_loss']:.4f}")
    table = {layer_name(load.name): relative(load.tokens) for load in loads}
    return LogPart(" | ".join(words), numbers, {EXPERT_LOAD: table})


def relative(tokens: Sequence[int]) -> list[float]:
    """Return the tokens of each expert over their mean: 1 is even."""
    mean = sum(tokens) / len(tokens)
    return [round(count / mean, 4) if mean else 0.0 for count in tokens]


def layer_name(router: str) -> str:
    """Return the layer of a router: of `decoder.blocks.5.moe.router` "layer 2", counted from 0, of
    `mtp.0.` "mtp 1", counted from 1 as its loss is."""
    depth = re.match(r"mtp\.([0-9]+)\.", router)
    if depth is not None:
        return f"mtp {int(depth[1]) + 1}"
    block = re.match(r"decoder\.blocks\.([0-9]+)\.", router)
    return router if block is None else f"layer {int(block[1]) // 2}"
