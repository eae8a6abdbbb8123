# SPDX-License-Identifier: Apache-2.0
"""The typed schema of a run: every option is one field of one frozen dataclass below.

The command line, the YAML files and the documentation are made from these classes by
`megatron.training.options`. A field `num_layers` is the flag `--num-layers` and the YAML key
`num-layers`; names are Megatron's. A field without a default is required, `None` means "off" or
"derived by `resolve`". Nothing edits a config: `resolve.py` returns a new one, `check.py` lists
what is wrong between fields, and each class checks its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.config.attention import AttentionOptions
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.data import DataConfig
from megatron.training.config.data_parallel import DataParallelConfig
from megatron.training.config.execution import ExecutionConfig
from megatron.training.config.experts import ExpertConfig
from megatron.training.config.failures import FailureConfig
from megatron.training.config.hybrid import HybridConfig
from megatron.training.config.logging import LoggingConfig
from megatron.training.config.model import ModelConfig, PositionConfig, TokenizerConfig
from megatron.training.config.muon import MuonConfig
from megatron.training.config.optimization import LossScaleConfig, OptimizerConfig, ScheduleConfig
from megatron.training.config.parallel import ParallelConfig
from megatron.training.config.pipeline import PipelineConfig
from megatron.training.config.profiling import ProfilingConfig
from megatron.training.config.training import TrainingConfig

__all__ = [
    "AttentionOptions",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DataParallelConfig",
    "ExecutionConfig",
    "ExpertConfig",
    "FailureConfig",
    "HybridConfig",
    "LoggingConfig",
    "LossScaleConfig",
    "ModelConfig",
    "MuonConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PipelineConfig",
    "PositionConfig",
    "ProfilingConfig",
    "ScheduleConfig",
    "TokenizerConfig",
    "TrainingConfig",
]


@dataclass(frozen=True, kw_only=True)
class Config:
    """One training run."""

    model: ModelConfig
    attention: AttentionOptions
    position: PositionConfig
    experts: ExpertConfig
    hybrid: HybridConfig
    tokenizer: TokenizerConfig
    parallel: ParallelConfig
    pipeline: PipelineConfig
    data_parallel: DataParallelConfig
    execution: ExecutionConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    muon: MuonConfig
    loss_scale: LossScaleConfig
    schedule: ScheduleConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    failures: FailureConfig
    logging: LoggingConfig
    profiling: ProfilingConfig

    @property
    def model_parallel_size(self) -> int:
        """Ranks that work on the same samples: tensor and context parallel ones of all stages."""
        shared = self.parallel.tensor_model_parallel_size * self.parallel.context_parallel_size
        return shared * self.pipeline.pipeline_model_parallel_size
