# SPDX-License-Identifier: Apache-2.0
"""Optimizers over flat ranges, clipping, the loss scaler and the learning-rate schedule."""

from megatron.core.optimizer.config import MuonConfig, OptimizerConfig
from megatron.core.optimizer.optimizer import Optimizer, OptimizerStepResult

__all__ = ["MuonConfig", "Optimizer", "OptimizerConfig", "OptimizerStepResult"]
