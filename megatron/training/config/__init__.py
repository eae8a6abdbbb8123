# SPDX-License-Identifier: Apache-2.0
"""The typed schema of a run: every option is one field of one frozen dataclass below.

`megatron.cli.schema` derives the command line, the YAML files and the documentation from these
classes. A field `num_layers` is the flag `--num-layers` and the YAML key `num-layers`; names are
Megatron's. A field without a default is required; `None` means "off" or "derived by `resolve`".
Configs are immutable: `resolve.py` returns a new config, `check.py` lists conflicts between
sections, and each class checks its own fields.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.config.checkpoint_options import CheckpointConfig, FailureConfig
from megatron.training.config.data_options import DataConfig, TokenizerConfig
from megatron.training.config.execution_options import (
    ExecutionConfig,
    ExperimentConfig,
    QuantizationOptions,
)
from megatron.training.config.logging_options import LoggingConfig, ProfilingConfig
from megatron.training.config.model_options import (
    ActivationOptions,
    AttentionOptions,
    ExpertConfig,
    HybridConfig,
    ModelConfig,
    PositionConfig,
    RopeScalingOptions,
)
from megatron.training.config.optimizer_options import (
    LossScaleConfig,
    MuonOptions,
    OptimizerOptions,
    ScheduleConfig,
)
from megatron.training.config.parallel_options import (
    DataParallelOptions,
    ParallelConfig,
    PipelineConfig,
)
from megatron.training.config.training_options import EvaluationConfig, TrainingConfig

__all__ = [
    "ActivationOptions",
    "AttentionOptions",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DataParallelOptions",
    "EvaluationConfig",
    "ExecutionConfig",
    "ExperimentConfig",
    "ExpertConfig",
    "FailureConfig",
    "HybridConfig",
    "LoggingConfig",
    "LossScaleConfig",
    "ModelConfig",
    "MuonOptions",
    "OptimizerOptions",
    "ParallelConfig",
    "PipelineConfig",
    "PositionConfig",
    "ProfilingConfig",
    "QuantizationOptions",
    "RopeScalingOptions",
    "ScheduleConfig",
    "TokenizerConfig",
    "TrainingConfig",
]


@dataclass(frozen=True, kw_only=True)
class Config:
    """One training run."""

    model: ModelConfig
    activations: ActivationOptions
    attention: AttentionOptions
    position: PositionConfig
    rope_scaling: RopeScalingOptions
    experts: ExpertConfig
    hybrid: HybridConfig
    tokenizer: TokenizerConfig
    parallel: ParallelConfig
    pipeline: PipelineConfig
    data_parallel: DataParallelOptions
    execution: ExecutionConfig
    quantization: QuantizationOptions
    training: TrainingConfig
    evaluation: EvaluationConfig
    optimizer: OptimizerOptions
    muon: MuonOptions
    loss_scale: LossScaleConfig
    schedule: ScheduleConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    failures: FailureConfig
    logging: LoggingConfig
    profiling: ProfilingConfig
    experiments: ExperimentConfig

    @property
    def model_parallel_size(self) -> int:
        """Ranks that process the same samples: tensor x context x pipeline parallel size."""
        shared = self.parallel.tensor_model_parallel_size * self.parallel.context_parallel_size
        return shared * self.pipeline.pipeline_model_parallel_size
