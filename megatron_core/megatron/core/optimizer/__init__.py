# SPDX-License-Identifier: Apache-2.0
"""Optimizers over flat ranges, gradient clipping, loss scalers and learning-rate schedules.

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.core.optimizer.loss_scaler import ConstantLossScaler as ConstantLossScaler
    from megatron.core.optimizer.loss_scaler import DynamicLossScaler as DynamicLossScaler
    from megatron.core.optimizer.loss_scaler import (
        DynamicLossScalerConfig as DynamicLossScalerConfig,
    )
    from megatron.core.optimizer.optimizer import Optimizer as Optimizer
    from megatron.core.optimizer.optimizer import OptimizerStepResult as OptimizerStepResult
    from megatron.core.optimizer.optimizer_config import MuonConfig as MuonConfig
    from megatron.core.optimizer.optimizer_config import OptimizerConfig as OptimizerConfig
    from megatron.core.optimizer.schedule import LearningRateSchedule as LearningRateSchedule
    from megatron.core.optimizer.schedule import WeightDecaySchedule as WeightDecaySchedule

__getattr__, __dir__, __all__ = lazy_exports(__name__)
