# SPDX-License-Identifier: Apache-2.0
"""The data sets of a run, a rank's microbatches, and what identifies data in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from megatron.core.datasets.batch_sizes import BatchSizes
from megatron.core.datasets.blend import BlendedDataset, build_split, has_split, parse_split
from megatron.core.datasets.chat_dataset import ChatDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.samplers import (
    CyclicOrder,
    GPTBatches,
    PrefetchedBatches,
    SampleOrder,
    SingleOrder,
    TokenSource,
)
from megatron.core.process_groups import Group
from megatron.training.config import DataConfig
from megatron.training.config.resolve import Run
from megatron.training.data.data_paths import SplitPath, prefixes, read_paths
from megatron.training.data.vocabulary import Vocabulary, holds_chats

_NAMES = ("train", "valid", "test")


@dataclass(frozen=True, kw_only=True)
class DataSets:
    """The data of a run.

    Args:
        train: samples to train on.
        validation: samples to validate on, the same at every validation; None without validation.
        test: samples for one evaluation at the end of the run; None if there are none.
        identity: what the order of the samples depends on, save for its length, as JSON.
        order_lengths: samples of each split that its order is made for, see `Progress`.
        notes: lines that describe what became of the data.
    """

    train: TokenSource
    validation: TokenSource | None
    test: TokenSource | None = None
    identity: Mapping[str, Any]
    order_lengths: Mapping[str, int]
    notes: tuple[str, ...] = ()


class Extensible(TokenSource, Protocol):
    """A data set that can have more samples behind those it has: all that a run reads are."""

    def extended(self, num_samples: int) -> TokenSource:
        """Return a data set that begins with the same samples and has at least so many."""


@dataclass(frozen=True, kw_only=True)
class SampleCounts:
    """How many samples of a split there are to be.

    Args:
        ordered: that its order is made for.
        needed: that the run takes of it; 0 leaves it out.
        cyclic: samples beyond those ordered are the same ones once more.
    """

    ordered: int
    needed: int
    cyclic: bool

    def extend(self, data: Extensible) -> TokenSource:
        """Return a data set that is ordered so, with as many samples as are needed."""
        return data if self.cyclic else data.extended(self.needed)


#: The token files of each split, and what they are of it; empty for --mock-data.
TokenFiles = Mapping[str, tuple[SplitPath, Sequence[IndexedDataset]]]


def open_token_files(config: DataConfig) -> TokenFiles:
    """Open the token files of the splits `train`, `valid` and `test`, each file once.

    Raises:
        ValueError: a file is missing or damaged.
    """
    opened: dict[str, IndexedDataset] = {}
    found = {}
    try:
        for name, split in read_paths(config).items():
            for prefix in split.path.prefixes:
                if prefix not in opened:
                    opened[prefix] = IndexedDataset(prefix)
            found[name] = (split, [opened[prefix] for prefix in split.path.prefixes])
    except FileNotFoundError as error:
        raise ValueError(str(error)) from None
    return found


def build_data_sets(
    run: Run,
    vocabulary: Vocabulary,
    *,
    token_files: TokenFiles | None = None,
    order_lengths: Mapping[str, int] | None = None,
    train_samples: int = 0,
) -> DataSets:
    """Build the sample indices of a run.

    Args:
        token_files: of the run; None opens them.
        order_lengths: of a run that goes on, samples that the order of each split was made for
            when it began, see `Progress`. The order is kept, and extended if more are needed.
        train_samples: that the run will have consumed at its end, where that is more than the steps
            of a run from the start.

    Raises:
        ValueError: a file is missing or damaged, or too short for a split; one line.
    """
    config = run.config.data
    common = _dataset_config(run, vocabulary)
    counts = _sample_counts(run, order_lengths or {}, train_samples)
    if config.mock_data:
        made = {
            name: count.extend(MockDataset(common, num_samples=count.ordered, split=i, name=name))
            for i, (name, count) in enumerate(counts.items())
            if count.needed
        }
        identity = {"files": [], "vocab_size": vocabulary.size, "kind": "mock"}
        return _data_sets(made, run, identity, counts=counts)
    if not (config.sft or config.allow_chat_as_text):
        _refuse_chats(prefixes(config))
    token_files = open_token_files(config) if token_files is None else token_files
    paths = {name: split for name, (split, _) in token_files.items()}
    sources = {name: opened for name, (_, opened) in token_files.items()}
    found: dict[str, TokenSource] = {}
    notes: list[str] = []
    for name, split in paths.items():
        if name == "test" and not _has_test(split, sources[name], run):
            if counts[name].needed and parse_split(config.split)[2]:
                notes.append(f"no test at the end: --split {config.split} leaves no document to it")
        elif counts[name].needed:
            found[name] = _split(
                run, split, common, name=name, count=counts[name], sources=sources[name]
            )
    if counts["valid"].needed and "valid" not in paths:
        notes.append("no validation: there is no --valid-data-path")
    notes += _chat_notes(found)
    path = paths["train"].path
    identity = {
        "files": [source.fingerprint for source in sources["train"]],
        "weights": None if path.weights is None else list(path.weights),
        "split": config.split if paths["train"].which is not None else None,
        "paths": [str(Path(prefix).resolve()) for prefix in path.prefixes],
    }
    if path.weights is None and len(path.prefixes) > 1 and config.dataloader_type != "cyclic":
        identity["blend"] = "by samples"  # earlier versions drew by tokens
    if config.sft:
        identity["kind"] = "sft"
    return _data_sets(found, run, identity, counts=counts, notes=notes)


def _sample_counts(
    run: Run, order_lengths: Mapping[str, int], train_samples: int
) -> dict[str, SampleCounts]:
    """Return how many samples of each split a run needs, see `build_data_sets`."""
    evaluation = run.config.evaluation
    evaluated = evaluation.eval_iters * run.evaluation.samples if evaluation.eval_interval else 0
    asked = dict(zip(_NAMES, (run.train_samples, evaluated, evaluated), strict=True))
    needed = {**asked, "train": max(run.train_samples, train_samples)}
    cyclic = run.config.data.dataloader_type == "cyclic"
    return {
        name: SampleCounts(
            ordered=order_lengths.get(name) or asked[name],
            needed=needed[name],
            cyclic=cyclic and name == "train",
        )
        for name in _NAMES
    }


def _refuse_chats(names: Sequence[str]) -> None:
    """Raise ValueError if token files hold conversations: read as text, the user's turns would be
    learnt as well, and conversations would follow each other without an end."""
    if chats := [name for name in names if holds_chats(name)]:
        raise ValueError(
            f"{', '.join(chats)} has conversations, which without --sft are read as one text and "
            "learnt token by token: give --sft, or --allow-chat-as-text if that is meant"
        )


def _dataset_config(run: Run, vocabulary: Vocabulary) -> GPTDatasetConfig:
    """Return what all samples of a run have in common. Raises ValueError."""
    config, training = run.config.data, run.config.training
    for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
        if vars(config)[name] and vocabulary.eod is None:
            raise ValueError(
                f"--{name.replace('_', '-')} needs an end-of-document token, and the vocabulary "
                "has none: leave it out, or give --tokenizer-model one that has"
            )
    return GPTDatasetConfig(
        sequence_length=training.seq_length,
        seed=training.seed,
        vocab_size=vocabulary.size,
        eod_token=vocabulary.eod,
        eod_mask_loss=config.eod_mask_loss,
        reset_position_ids=config.reset_position_ids,
        reset_attention_mask=config.reset_attention_mask,
        cache_dir=config.data_cache_path,
    )


def _has_test(split: SplitPath, sources: Sequence[IndexedDataset], run: Run) -> bool:
    """Say whether a test split has documents: the default --split asks for one of any data."""
    shares = parse_split(run.config.data.split)
    return split.which is None or has_split(sources, shares, split.which)


def _split(
    run: Run,
    split: SplitPath,
    common: GPTDatasetConfig,
    *,
    name: str,
    count: SampleCounts,
    sources: Sequence[IndexedDataset],
) -> TokenSource:
    config = run.config.data
    # cyclic permutes one pass itself; a weighted blend has no "one pass": it is truncated.
    one_pass = count.cyclic and split.path.weights is None
    data = build_split(
        split.path,
        common,
        name=name,
        shares=(1.0,) if split.which is None else parse_split(config.split),
        which=split.which or 0,
        num_samples=None if one_pass else count.ordered,
        dataset_type=ChatDataset if config.sft else GPTDataset,
        sources=sources,
    )
    return count.extend(data)


def _data_sets(
    found: Mapping[str, TokenSource],
    run: Run,
    identity: Mapping[str, Any],
    *,
    counts: Mapping[str, SampleCounts],
    notes: Sequence[str] = (),
) -> DataSets:
    training, train = run.config.training, counts["train"]
    kept = []
    if train.ordered != run.train_samples:
        kept.append(
            f"samples keep the order for {train.ordered:,} that the run began with; "
            "--reorder-samples makes one for the present length"
        )
    return DataSets(
        train=found["train"],
        validation=found.get("valid"),
        test=found.get("test"),
        identity={
            **identity,
            "sequence_length": training.seq_length,
            "seed": training.seed,
            "dataloader_type": run.config.data.dataloader_type,
        },
        order_lengths={name: count.ordered for name, count in counts.items()},
        notes=(*notes, *kept),
    )


def _chat_notes(found: Mapping[str, TokenSource]) -> list[str]:
    """Log for each part of the training data what became of its conversations."""
    train = found.get("train")
    parts = train.datasets if isinstance(train, BlendedDataset) else [train]
    notes = []
    for part in parts:
        if isinstance(part, ChatDataset):
            counted = part.statistics
            notes.append(
                f"{part.source.prefix}: {counted.conversations:,} conversations packed into "
                f"{counted.rows:,} samples, {counted.filled:.1%} of them filled; one pass cuts "
                f"{counted.truncated:,} to --seq-length + 1 tokens and leaves out "
                f"{counted.left_out:,} with nothing to learn"
            )
    return notes


def training_batches(
    data: DataSets, run: Run, *, lanes: Group, consumed_samples: int
) -> GPTBatches:
    """Return this data-parallel rank's microbatches from a position on.

    Args:
        lanes: the ranks that see different samples.
        consumed_samples: samples used before, by all data-parallel ranks together.
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
        batch_sizes=run.batch_sizes,
    )


def read_ahead(batches: GPTBatches, run: Run) -> GPTBatches | PrefetchedBatches:
    """Let `--num-workers` threads read microbatches ahead; the caller closes those."""
    workers = run.config.data.num_workers
    return PrefetchedBatches(batches, workers=workers) if workers else batches


def validation_batches(
    data: DataSets, run: Run, *, lanes: Group, split: Literal["validation", "test"] = "validation"
) -> GPTBatches:
    """Return this rank's microbatches of one validation, each of which sees the same samples."""
    source = data.validation if split == "validation" else data.test
    assert source is not None
    return GPTBatches(
        source,
        micro_batch_size=run.evaluation.micro_batch_size,
        lanes_rank=lanes.rank,
        lanes_size=lanes.size,
        batch_sizes=BatchSizes.constant(run.evaluation.samples),
    )


def compare_identity(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List how the data of a checkpoint differs from a run's; empty if samples go on in order."""
    differences = []
    for name in dict.fromkeys([*saved, *now]):
        before, after = saved.get(name), now.get(name)
        if name == "paths" or before == after:
            continue
        if name == "files" and len(before or ()) == len(after or ()):
            paths = now.get("paths", ())
            for i, (old, new, path) in enumerate(zip(before, after, paths, strict=True), 1):
                if old != new:
                    differences.append(f"data file {i}, {path}, has other content")
        elif name == "files":
            differences.append(
                f"{len(before or ())} data files in the checkpoint ({_listed(saved)}), "
                f"{len(after)} now ({_listed(now)})"
            )
        else:
            differences.append(f"{name}: {before} in the checkpoint, {after} now")
    return differences


def _listed(identity: Mapping[str, Any]) -> str:
    return ", ".join(identity.get("paths", ())) or "unnamed"
