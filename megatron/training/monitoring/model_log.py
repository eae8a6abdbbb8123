# SPDX-License-Identifier: Apache-2.0
"""The parts of a log line about the model: losses of multi-token prediction, load of experts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import fmean

from megatron.core.models.gpt import GPTModel, take_mean_mtp_losses
from megatron.core.moe import MoEConfig
from megatron.core.moe.router import Balance, RouterLoad
from megatron.training.hooks import LogPart, TrainingHooks
from megatron.training.monitoring.metrics import EXPERT_LOAD


class ModelLog(TrainingHooks):
    """Adds the model's counters to log lines.

    Args:
        model: may have multi-token prediction depths.
        balance: the balance of expert loads; None without experts.
    """

    def __init__(self, model: GPTModel, balance: Balance | None) -> None:
        self._model, self._balance = model, balance

    def log_parts(self) -> list[LogPart]:
        """Return the losses of MTP depths and the expert loads; every rank calls this."""
        log_parts = []
        if self._model.config.mtp_num_layers:
            log_parts.append(mtp_losses(self._model))
        if self._balance is not None:
            log_parts.append(load_balance(self._balance.report(), self._balance.config))
        return log_parts


def mtp_losses(model: GPTModel) -> LogPart:
    """Return the log part of multi-token prediction losses since the previous line; depths count
    from 1.

    Every rank calls this.
    """
    losses = dict(enumerate(take_mean_mtp_losses(model), start=1))
    words = " | ".join(f"mtp {depth} loss: {loss:.6E}" for depth, loss in losses.items())
    return LogPart(words, {f"mtp_{depth}_loss": loss for depth, loss in losses.items()})


def load_balance(loads: Sequence[RouterLoad], config: MoEConfig) -> LogPart:
    """Return the log part of the load of all routers since the previous line.

    Args:
        loads: the load of every router, in the model's order.
        config: of the experts; quantities of disabled features are left out.
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
    """Return the tokens of each expert divided by their mean: 1 is an even load."""
    mean = sum(tokens) / len(tokens)
    return [round(count / mean, 4) if mean else 0.0 for count in tokens]


def layer_name(router: str) -> str:
    """Return the display name of a router: "layer 2", counted from 0, for
    `decoder.blocks.5.moe.router`; "mtp 1", counted from 1 like its loss, for `mtp.0.`."""
    mtp_match = re.match(r"mtp\.([0-9]+)\.", router)
    if mtp_match is not None:
        return f"mtp {int(mtp_match[1]) + 1}"
    block_match = re.match(r"decoder\.blocks\.([0-9]+)\.", router)
    return router if block_match is None else f"layer {int(block_match[1]) // 2}"
