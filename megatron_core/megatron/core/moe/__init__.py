# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: router, dispatch of tokens to experts, experts."""

from megatron.core.moe.dispatch import CapacityCheck
from megatron.core.moe.layer import MoE, capacities_of
from megatron.core.moe.moe_config import MoEConfig, RouterConfig
from megatron.core.moe.router import Balance, RouterLoad, routers_of

__all__ = [
    "Balance",
    "CapacityCheck",
    "MoE",
    "MoEConfig",
    "RouterConfig",
    "RouterLoad",
    "capacities_of",
    "routers_of",
]
