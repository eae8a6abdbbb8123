# SPDX-License-Identifier: Apache-2.0
"""The model that a checkpoint describes, compared with its tensors before either is built.

A description may ask for any number of layers or any size. Numbers that determine how much is built
are compared with the manifest, then the shape of every weight, on the meta device.
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

#: Counts of layers and blocks, and texts of a character for each: all have tensors of their own.
_LAYERS = (
    *("num_layers", "num-layers", "mtp_num_layers", "mtp-num-layers"),
    *("pattern", "ffn_pattern", "mtp_pattern", "hybrid-layer-pattern"),
)
#: No model has more: building a block takes a millisecond, on the meta device too.
_MAX_LAYERS = 4096
#: Fields that are no sizes of tensors.
_FREE = (
    "rope",
    "window",
    "window-size",
    "max_position_embeddings",
    "max-position-embeddings",
)
#: Counts that need not be a tensor's dimension are at most this.
_MAX_COUNT_SIZE = 4096
#: Problems named in one error; the rest is counted.
_MAX_LISTED = 4

#: What every weight has under Adam.
_MOMENTS = ("exp_avg", "exp_avg_sq")


def check_counts(folder: Path, described: Mapping[str, Any], manifest: Manifest) -> None:
    """See that no count in a description is of more than the tensors of a checkpoint can be of.

    Args:
        folder: of the checkpoint.
        described: fields of a model, or options by flag name that give it its shape.
        manifest: of the checkpoint.

    Raises:
        DamagedCheckpointError: one is.
    """
    shapes = [tensor.shape for tensor in manifest.tensors.values()]
    largest = max((size for shape in shapes for size in shape), default=0)
    layers = min(max(len(shapes), 1), _MAX_LAYERS)
    sizes = max(largest, len(shapes), _MAX_COUNT_SIZE)
    for name, value in _counts(described):
        limit = layers if name in _LAYERS else sizes
        if abs(value) > limit:
            raise DamagedCheckpointError(
                f"{folder} cannot be used: {name} is {str(value)[:40]}, its {len(shapes)} tensors "
                f"are of {limit} at most"
            )


def _counts(fields: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the whole numbers of nested fields, and the lengths of texts and lists, by name."""
    counts: list[tuple[str, int]] = []
    for name, value in fields.items():
        if name in _FREE:
            continue
        if isinstance(value, Mapping):
            counts += _counts(value)
        elif isinstance(value, str | list):
            counts.append((name, len(value)))
        elif type(value) is int:
            counts.append((name, value))
    return counts


def described_config(folder: Path, manifest: Manifest) -> GPTConfig:
    """Return the model that a checkpoint describes, its counts compared with the tensors.

    Raises:
        ValueError: it describes none, or one of another version of this program.
        DamagedCheckpointError: no such tensors could be those of what it describes.
    """
    from megatron.core.models.gpt_config import GPTConfig

    described = manifest.extra.get("model")
    if described is None or manifest.extra.get("config") is None:
        raise ValueError(f"{folder} is no training checkpoint: it lacks 'model' or 'config'")
    for name in ("model", "config", "tokenizer"):
        if not isinstance(manifest.extra.get(name, {}), Mapping):
            raise DamagedCheckpointError(f"{folder} cannot be used: {name} is no JSON object")
    check_counts(folder, described, manifest)
    try:
        return GPTConfig.from_json(described)
    except ValueError as error:
        raise ValueError(f"{folder} holds {error}") from None
    except (TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise DamagedCheckpointError(
            f"{folder} cannot be used: its model cannot be understood: {error}"
        ) from error


def stored_model(folder: Path, manifest: Manifest) -> GPTConfig:
    """Return the model whose weights a checkpoint holds.

    Raises:
        ValueError: the checkpoint describes none, or one of another version of this program.
        DamagedCheckpointError: its tensors are not those of the model that it describes.
    """
    config = described_config(folder, manifest)
    _check_shapes(folder, manifest, config)
    return config


def _check_shapes(folder: Path, manifest: Manifest, config: GPTConfig) -> list[str]:
    """Compare the tensors of a checkpoint with its model and return the names of the weights; for
    errors see `stored_model`."""
    try:
        weights, states = _shapes(config)
    except (ValueError, CheckpointError) as error:
        raise ValueError(f"{folder} holds {error}") from None
    except (TypeError, KeyError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise DamagedCheckpointError(
            f"{folder} cannot be used: nothing can be made of the model that it describes: {error}"
        ) from error
    problems = []
    for name, shape in (weights | states).items():
        stored = manifest.tensors.get(name)
        if stored is None:
            problems.append(f"{name} is missing")
        elif stored.shape != shape:
            problems.append(f"{name} is {list(stored.shape)}, its model makes it {list(shape)}")
    if problems:
        num_unlisted = len(problems) - _MAX_LISTED
        raise DamagedCheckpointError(
            f"{folder} does not hold the weights of its model: {'; '.join(problems[:_MAX_LISTED])}"
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
        segment.name: tuple(segment.shape)
        for sharding in shardings
        for segment in sharding.segments
    }
    return weights, {name: tuple(tensor.shape) for name, tensor in model.store.states.items()}


def check_stored(folder: Path, manifest: Manifest) -> str:
    """See that a checkpoint of a run holds every tensor that it should.

    Args:
        folder: of the checkpoint.
        manifest: of the checkpoint.

    Returns:
        A line on why that is unknown; "" if it is known, or if the checkpoint is of no run.

    Raises:
        DamagedCheckpointError: it does not.
    """
    if "model" not in manifest.extra or "config" not in manifest.extra:
        return ""  # of the library alone
    try:
        weights = _check_shapes(folder, manifest, described_config(folder, manifest))
    except ValueError as error:
        return f"its tensors are not compared with its model, which is not known here: {error}"
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
