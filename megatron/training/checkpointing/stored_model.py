# SPDX-License-Identifier: Apache-2.0
"""The model that a checkpoint describes, compared with its tensors before either is built.

A damaged description may claim any number of layers or any size. Numbers that determine how much is
built are compared with the manifest first, then the shape of every weight, on the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.dist_checkpointing.checkpoint_errors import (
    CheckpointError,
    DamagedCheckpointError,
)
from megatron.core.dist_checkpointing.manifest import Manifest

if TYPE_CHECKING:
    from megatron.core.models.gpt_config import GPTConfig

#: Counts of layers and blocks, and strings with a character per layer or block; each has tensors.
_LAYERS = (
    *("num_layers", "num-layers", "mtp_num_layers", "mtp-num-layers"),
    *("pattern", "ffn_pattern", "mtp_pattern", "hybrid-layer-pattern"),
)
#: Larger counts are treated as corrupt: building a block takes a millisecond even on meta.
_MAX_LAYERS = 4096
#: Fields that are not tensor dimensions.
_UNCHECKED = (
    "rope",
    "window",
    "window-size",
    "max_position_embeddings",
    "max-position-embeddings",
)
#: Limit on counts that need not be a tensor dimension.
_MAX_COUNT_SIZE = 4096
#: Number of problems listed in one error; others are counted.
_MAX_LISTED = 4

#: Adam's moments, stored for every weight.
_MOMENTS = ("exp_avg", "exp_avg_sq")


def check_counts(folder: Path, described: Mapping[str, Any], manifest: Manifest) -> None:
    """Check that no count in a description exceeds what the checkpoint's tensors allow.

    Args:
        folder: folder of the checkpoint.
        described: fields of a model config, or options by flag name that define its shape.
        manifest: manifest of the checkpoint.

    Raises:
        DamagedCheckpointError: a count is too large.
    """
    shapes = [tensor.shape for tensor in manifest.tensors.values()]
    largest = max((size for shape in shapes for size in shape), default=0)
    max_layers = min(max(len(shapes), 1), _MAX_LAYERS)
    max_size = max(largest, len(shapes), _MAX_COUNT_SIZE)
    for name, value in _counts(described):
        limit = max_layers if name in _LAYERS else max_size
        if abs(value) > limit:
            raise DamagedCheckpointError(
                f"{folder} cannot be used: {name} is {str(value)[:40]}, its {len(shapes)} tensors "
                f"allow at most {limit}"
            )


def _counts(fields: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the integers of nested fields, and the lengths of strings and lists, by name."""
    counts: list[tuple[str, int]] = []
    for name, value in fields.items():
        if name in _UNCHECKED:
            continue
        if isinstance(value, Mapping):
            counts += _counts(value)
        elif isinstance(value, str | list):
            counts.append((name, len(value)))
        elif type(value) is int:
            counts.append((name, value))
    return counts


def described_config(folder: Path, manifest: Manifest) -> GPTConfig:
    """Return the model config that a checkpoint describes, after comparing its counts with the
    tensors.

    Raises:
        ValueError: the checkpoint describes no model, or one of another version of this program.
        DamagedCheckpointError: the tensors cannot belong to the described model.
    """
    from megatron.core.models.gpt_config import GPTConfig

    described = manifest.extra.get("model")
    if described is None or manifest.extra.get("config") is None:
        raise ValueError(f"{folder} is not a training checkpoint: it lacks 'model' or 'config'")
    for name in ("model", "config", "tokenizer"):
        if not isinstance(manifest.extra.get(name, {}), Mapping):
            raise DamagedCheckpointError(f"{folder} cannot be used: {name} is not a JSON object")
    check_counts(folder, described, manifest)
    try:
        return GPTConfig.from_json(described)
    except ValueError as error:
        raise ValueError(f"{folder} contains {error}") from None
    except (TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise DamagedCheckpointError(
            f"{folder} cannot be used: cannot parse its model: {error}"
        ) from error


def stored_model(folder: Path, manifest: Manifest) -> GPTConfig:
    """Return the config of the model whose weights a checkpoint contains.

    Raises:
        ValueError: the checkpoint describes no model, or one of another version of this program.
        DamagedCheckpointError: the tensors do not belong to the described model.
    """
    config = described_config(folder, manifest)
    _check_shapes(folder, manifest, config)
    return config


def _check_shapes(folder: Path, manifest: Manifest, config: GPTConfig) -> list[str]:
    """Compare the tensors of a checkpoint with its model and return the names of the weights;
    raises like `stored_model`."""
    try:
        weights, states = _shapes(config)
    except (ValueError, CheckpointError) as error:
        raise ValueError(f"{folder} contains {error}") from None
    except (TypeError, KeyError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise DamagedCheckpointError(
            f"{folder} cannot be used: cannot build the model that it describes: {error}"
        ) from error
    problems = []
    for name, shape in (weights | states).items():
        stored = manifest.tensors.get(name)
        if stored is None:
            problems.append(f"{name} is missing")
        elif stored.shape != shape:
            problems.append(f"{name} is {list(stored.shape)}, its model requires {list(shape)}")
    if problems:
        num_unlisted = len(problems) - _MAX_LISTED
        raise DamagedCheckpointError(
            f"{folder} does not contain the weights of its model: "
            f"{'; '.join(problems[:_MAX_LISTED])}"
            f"{f'; and {num_unlisted} more' if num_unlisted > 0 else ''}"
        )
    return list(weights)


def _shapes(config: GPTConfig) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return the shapes of a model's weights, and of its states; nothing is allocated."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.process_groups import ProcessGroupCollection
    from megatron.core.weight_gather import Storage

    model = GPTModel(
        config,
        ProcessGroupCollection.single(),
        device="meta",
        storage=Storage(initialize=False),
    )
    shardings = (handle.sharding for handle in model.store.handles.values())
    weights = {
        sub_weight.name: tuple(sub_weight.shape)
        for sharding in shardings
        for sub_weight in sharding.sub_weights
    }
    return weights, {name: tuple(tensor.shape) for name, tensor in model.store.states.items()}


def check_stored(folder: Path, manifest: Manifest) -> str:
    """Check that a checkpoint of a run contains every tensor that it should.

    Args:
        folder: folder of the checkpoint.
        manifest: manifest of the checkpoint.

    Returns:
        A line on why this cannot be checked; "" if it was checked, or the checkpoint is not a
        run's.

    Raises:
        DamagedCheckpointError: a tensor is missing.
    """
    if "model" not in manifest.extra or "config" not in manifest.extra:
        return ""  # not written by a training run
    try:
        weights = _check_shapes(folder, manifest, described_config(folder, manifest))
    except ValueError as error:
        return f"its tensors are not checked: its model is unknown to this version: {error}"
    optimizer = manifest.extra.get("optimizer")
    is_adam = isinstance(optimizer, Mapping) and optimizer.get("kind") == "adam"
    if not is_adam or manifest.extra.get("weights_only") is True:
        return ""
    if optimizer.get("saved") is False:  # --no-save-optim
        return ""
    names = (f"optimizer.{kind}/{weight}" for weight in weights for kind in _MOMENTS)
    absent = [name for name in names if name not in manifest.tensors]
    if absent:
        raise DamagedCheckpointError(f"{folder} lacks {absent[0]} ({len(absent)} missing in all)")
    return ""
