# SPDX-License-Identifier: Apache-2.0
"""The data sets of a run, the microbatches of a lane, and what identifies data in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.datasets.blend import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.samplers import CyclicOrder, GPTBatches, SampleOrder, SingleOrder
from megatron.core.datasets.splits import build_splits, parse_data_path, parse_split
from megatron.core.process_groups import Group
from megatron.training.resolve import Run
from megatron.training.vocabulary import Vocabulary


@dataclass(frozen=True, kw_only=True)
class DataSets:
    """The data of a run.

    Args:
        train: samples to train on.
        validation: samples to validate on, the same at every validation; None without validation.
        identity: what the order of the samples depends on, save for the length of the run, as JSON.
    """

    train: GPTDataset | BlendedDataset
    validation: GPTDataset | BlendedDataset | None
    identity: Mapping[str, Any]


def build_data_sets(run: Run, vocabulary: Vocabulary) -> DataSets:
    """Open token files and build the sample indices of a run.

    Raises:
        ValueError: a file is missing or damaged, or too short for a split; one line.
    """
    config, training = run.config, run.config.training
    batch = training.global_batch_size
    assert batch is not None, "the run must be resolved"
    validates = training.eval_interval > 0
    common = GPTDatasetConfig(
        sequence_length=training.seq_length,
        seed=training.seed,
        vocab_size=vocabulary.size,
        eod_token=vocabulary.eod,
        eod_mask_loss=config.data.eod_mask_loss,
        cache_dir=config.data.data_cache_path,
    )
    path = parse_data_path(config.data.data_path)
    # cyclic permutes one pass itself; a weighted blend has no "one pass" and is cut to length.
    one_pass = config.data.dataloader_type == "cyclic" and path.weights is None
    try:
        train, validation, _ = build_splits(
            path,
            common,
            shares=parse_split(config.data.split),
            num_samples=(
                None if one_pass else run.train_samples,
                training.eval_iters * batch if validates else 0,
                0,
            ),
        )
        identity = {
            "files": [IndexedDataset(prefix).fingerprint for prefix in path.prefixes],
            "weights": None if path.weights is None else list(path.weights),
            "split": config.data.split,
            "sequence_length": training.seq_length,
            "seed": training.seed,
            "dataloader_type": config.data.dataloader_type,
        }
    except FileNotFoundError as error:
        raise ValueError(str(error)) from None
    assert train is not None
    return DataSets(train=train, validation=validation, identity=identity)


def training_batches(
    data: DataSets, run: Run, *, lanes: Group, consumed_samples: int
) -> GPTBatches:
    """Return this lane's microbatches from a position on.

    Args:
        lanes: the ranks that see different samples.
        consumed_samples: samples used before, by all lanes together.
    """
    order: SampleOrder
    if run.config.data.dataloader_type == "cyclic":
        order = CyclicOrder(len(data.train), run.config.training.seed)
    else:
        order = SingleOrder(len(data.train))
    return GPTBatches(
        data.train,
        micro_batch_size=run.config.training.micro_batch_size,
        lanes_rank=lanes.rank,
        lanes_size=lanes.size,
        consumed_samples=consumed_samples,
        order=order,
    )


def validation_batches(data: DataSets, run: Run, *, lanes: Group) -> GPTBatches:
    """Return this lane's microbatches of one validation; every validation sees the same samples."""
    assert data.validation is not None
    return GPTBatches(
        data.validation,
        micro_batch_size=run.config.training.micro_batch_size,
        lanes_rank=lanes.rank,
        lanes_size=lanes.size,
    )


def compare_identity(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List how the data of a checkpoint differs from a run's; empty if samples go on in order."""
    return [
        f"{name}: {saved.get(name)} in the checkpoint, {now[name]} now"
        for name in now
        if saved.get(name) != now[name]
    ]
