# SPDX-License-Identifier: Apache-2.0
"""Recurrent mixers: gated delta net and Mamba-2, and how they meet the tokens of other ranks."""

from megatron.core.ssm.config import GatedDeltaNetConfig, Mamba2Config

__all__ = ["GatedDeltaNetConfig", "Mamba2Config"]
