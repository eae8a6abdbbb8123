# SPDX-License-Identifier: Apache-2.0
"""The data of a run: token files, data sets, a rank's microbatches, and the data identity stored in
checkpoints.

Vocabulary and token files are read before the run joins the other ranks (`read_inputs`), with the
values that must be equal on all ranks, compared before process groups are created.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from megatron.cli.rank_agreement import StartFacts, option_values, versions
from megatron.core.datasets.batch_sizes import BatchSizes
from megatron.core.datasets.blend import BlendedDataset, build_split, has_split, parse_split
from megatron.core.datasets.chat_dataset import ChatDataset, mask_prefix
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
from megatron.training.config.resolve import ResolvedRun
from megatron.training.data.data_paths import SplitPath, prefixes, read_paths
from megatron.training.data.vocabulary import Vocabulary, holds_chats, read_vocabulary

_NAMES = ("train", "valid", "test")


@dataclass(frozen=True, kw_only=True)
class DataSets:
    """The data of a run.

    Args:
        train: samples to train on.
        validation: samples of every validation; None without validation.
        test: samples for one evaluation at the end of the run; None if there are none.
        identity: inputs that determine the sample order, except its length, as JSON.
        order_lengths: number of samples that each split's order was built for, see `Progress`.
        notes: log lines about the data.
    """

    train: TokenSource
    validation: TokenSource | None
    test: TokenSource | None = None
    identity: Mapping[str, Any]
    order_lengths: Mapping[str, int]
    notes: tuple[str, ...] = ()


class ExtensibleSource(TokenSource, Protocol):
    """A data set that can be extended with further samples; every data set of a run can."""

    def extended(self, num_samples: int) -> TokenSource:
        """Return a data set with the same first samples and at least `num_samples` in total."""
        ...


@dataclass(frozen=True, kw_only=True)
class SampleCounts:
    """Number of samples of a split.

    Args:
        ordered: samples that the order is built for.
        needed: samples that the run consumes; 0 leaves the split out.
        cyclic: after `ordered` samples the same samples repeat.
    """

    ordered: int
    needed: int
    cyclic: bool

    def extend(self, data: ExtensibleSource) -> TokenSource:
        """Return the data set, extended to `needed` samples unless it is cyclic."""
        return data if self.cyclic else data.extended(self.needed)


#: Path and open token files of each split; empty for --mock-data.
TokenFiles = Mapping[str, tuple[SplitPath, Sequence[IndexedDataset]]]


def open_token_files(config: DataConfig) -> TokenFiles:
    """Open the token files of the splits `train`, `valid` and `test`, each file once.

    Raises:
        ValueError: a file is missing or damaged.
    """
    datasets: dict[str, IndexedDataset] = {}
    token_files = {}
    try:
        for name, split in read_paths(config).items():
            for prefix in split.path.prefixes:
                if prefix not in datasets:
                    datasets[prefix] = IndexedDataset(prefix)
            token_files[name] = (split, [datasets[prefix] for prefix in split.path.prefixes])
    except FileNotFoundError as error:
        raise ValueError(str(error)) from None
    return token_files


def build_data_sets(
    run: ResolvedRun,
    vocabulary: Vocabulary,
    *,
    token_files: TokenFiles | None = None,
    order_lengths: Mapping[str, int] | None = None,
    train_samples: int = 0,
) -> DataSets:
    """Build the sample indices of a run.

    Args:
        token_files: open token files of the run; None opens them.
        order_lengths: for a resumed run, the number of samples that each split's order was built
            for originally, see `Progress`. The order is preserved, and extended if necessary.
        train_samples: samples consumed by the end of the run, if a resumed run consumes more than a
            run from scratch.

    Raises:
        ValueError: a file is missing or damaged, or too short for a split.
    """
    config = run.config.data
    dataset_config = _dataset_config(run, vocabulary)
    counts = _sample_counts(run, order_lengths or {}, train_samples)
    if config.mock_data:
        mock_datasets = {
            name: count.extend(
                MockDataset(dataset_config, num_samples=count.ordered, split=i, name=name)
            )
            for i, (name, count) in enumerate(counts.items())
            if count.needed
        }
        identity = {"files": [], "vocab_size": vocabulary.size, "kind": "mock"}
        return _collect(mock_datasets, run, identity, counts=counts)
    if not (config.sft or config.allow_chat_as_text):
        _refuse_chats(prefixes(config))
    token_files = open_token_files(config) if token_files is None else token_files
    paths = {name: split for name, (split, _) in token_files.items()}
    sources = {name: opened for name, (_, opened) in token_files.items()}
    datasets: dict[str, TokenSource] = {}
    notes: list[str] = []
    for name, split in paths.items():
        if name == "test" and not _has_test(split, sources[name], run):
            if counts[name].needed and parse_split(config.split)[2]:
                notes.append(f"no test at the end: --split {config.split} gives it no document")
        elif counts[name].needed:
            datasets[name] = _build_split(
                run,
                split,
                dataset_config,
                name=name,
                sample_count=counts[name],
                sources=sources[name],
            )
    if counts["valid"].needed and "valid" not in paths:
        notes.append("no validation: there is no --valid-data-path")
    notes += _chat_notes(datasets)
    path = paths["train"].path
    identity = {
        "files": [source.fingerprint for source in sources["train"]],
        "weights": None if path.weights is None else list(path.weights),
        "split": config.split if paths["train"].split_index is not None else None,
        "paths": [str(Path(prefix).resolve()) for prefix in path.prefixes],
    }
    if path.weights is None and len(path.prefixes) > 1 and config.dataloader_type != "cyclic":
        identity["blend"] = "by samples"  # earlier versions drew by tokens
    if config.sft:
        identity["kind"] = "sft"
    return _collect(datasets, run, identity, counts=counts, notes=notes)


def _sample_counts(
    run: ResolvedRun, order_lengths: Mapping[str, int], train_samples: int
) -> dict[str, SampleCounts]:
    """Return the number of samples of each split, see `build_data_sets`."""
    evaluation = run.config.evaluation
    eval_samples = evaluation.eval_iters * run.evaluation.samples if evaluation.eval_interval else 0
    planned = dict(zip(_NAMES, (run.train_samples, eval_samples, eval_samples), strict=True))
    needed = {**planned, "train": max(run.train_samples, train_samples)}
    cyclic = run.config.data.dataloader_type == "cyclic"
    return {
        name: SampleCounts(
            ordered=order_lengths.get(name) or planned[name],
            needed=needed[name],
            cyclic=cyclic and name == "train",
        )
        for name in _NAMES
    }


def _refuse_chats(names: Sequence[str]) -> None:
    """Raise ValueError if token files contain conversations.

    Read as plain text, the user's turns would be in the loss, and nothing would separate
    conversations.
    """
    if chats := [name for name in names if holds_chats(name)]:
        raise ValueError(
            f"{', '.join(chats)} contains conversations, which without --sft would be read as "
            "plain "
            "text with a loss on every token: give --sft, or --allow-chat-as-text if that is "
            "intended"
        )


def _dataset_config(run: ResolvedRun, vocabulary: Vocabulary) -> GPTDatasetConfig:
    """Return the options that all data sets of a run share. Raises ValueError."""
    config, training = run.config.data, run.config.training
    for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
        if vars(config)[name] and vocabulary.eod is None:
            raise ValueError(
                f"--{name.replace('_', '-')} needs an end-of-document token, and the vocabulary "
                "has none: drop it, or give a --tokenizer-model that has one"
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


def _has_test(split: SplitPath, sources: Sequence[IndexedDataset], run: ResolvedRun) -> bool:
    """Return whether the test split has documents: the default --split may leave it none."""
    shares = parse_split(run.config.data.split)
    return split.split_index is None or has_split(sources, shares, split.split_index)


def _build_split(
    run: ResolvedRun,
    split: SplitPath,
    dataset_config: GPTDatasetConfig,
    *,
    name: str,
    sample_count: SampleCounts,
    sources: Sequence[IndexedDataset],
) -> TokenSource:
    config = run.config.data
    # CyclicOrder permutes a single pass. A weighted blend has no single pass: it is truncated.
    one_pass = sample_count.cyclic and split.path.weights is None
    data = build_split(
        split.path,
        dataset_config,
        name=name,
        shares=(1.0,) if split.split_index is None else parse_split(config.split),
        which=split.split_index or 0,
        num_samples=None if one_pass else sample_count.ordered,
        dataset_type=ChatDataset if config.sft else GPTDataset,
        sources=sources,
    )
    return sample_count.extend(data)


def _collect(
    datasets: Mapping[str, TokenSource],
    run: ResolvedRun,
    identity: Mapping[str, Any],
    *,
    counts: Mapping[str, SampleCounts],
    notes: Sequence[str] = (),
) -> DataSets:
    training, train = run.config.training, counts["train"]
    order_notes = []
    if train.ordered != run.train_samples:
        order_notes.append(
            f"samples keep the order of {train.ordered:,} samples that the run started with; "
            "--reorder-samples shuffles for the current length"
        )
    return DataSets(
        train=datasets["train"],
        validation=datasets.get("valid"),
        test=datasets.get("test"),
        identity={
            **identity,
            "sequence_length": training.seq_length,
            "seed": training.seed,
            "dataloader_type": run.config.data.dataloader_type,
        },
        order_lengths={name: count.ordered for name, count in counts.items()},
        notes=(*notes, *order_notes),
    )


def _chat_notes(datasets: Mapping[str, TokenSource]) -> list[str]:
    """Return a line on packing and truncation for each training data set of conversations."""
    train = datasets.get("train")
    train_datasets = train.datasets if isinstance(train, BlendedDataset) else [train]
    notes = []
    for dataset in train_datasets:
        if isinstance(dataset, ChatDataset):
            statistics = dataset.statistics
            notes.append(
                f"{dataset.source.prefix}: {statistics.conversations:,} conversations packed "
                f"into {statistics.rows:,} samples, {statistics.filled:.1%} full; one pass "
                f"truncates {statistics.truncated:,} to --seq-length + 1 tokens and leaves "
                f"out {statistics.left_out:,} without a token in the loss"
            )
    return notes


def training_batches(
    data: DataSets, run: ResolvedRun, *, dp_group: Group, consumed_samples: int
) -> GPTBatches:
    """Return this data-parallel rank's microbatches after `consumed_samples`.

    Args:
        dp_group: the ranks that see different samples.
        consumed_samples: samples consumed so far by all data-parallel ranks.
    """
    order: SampleOrder
    if run.config.data.dataloader_type == "cyclic":
        order = CyclicOrder(len(data.train), run.config.training.seed)
    else:
        order = SingleOrder(len(data.train))
    return GPTBatches(
        data.train,
        micro_batch_size=run.config.training.micro_batch_size,
        data_parallel_rank=dp_group.rank,
        data_parallel_size=dp_group.size,
        consumed_samples=consumed_samples,
        order=order,
        batch_sizes=run.batch_sizes,
    )


def read_ahead(batches: GPTBatches, run: ResolvedRun) -> GPTBatches | PrefetchedBatches:
    """Prefetch microbatches in `--num-workers` threads; the caller closes the iterator."""
    workers = run.config.data.num_workers
    return PrefetchedBatches(batches, workers=workers) if workers else batches


def validation_batches(
    data: DataSets,
    run: ResolvedRun,
    *,
    dp_group: Group,
    split: Literal["validation", "test"] = "validation",
) -> GPTBatches:
    """Return this rank's microbatches of one validation; every validation uses the same samples."""
    source = data.validation if split == "validation" else data.test
    assert source is not None
    return GPTBatches(
        source,
        micro_batch_size=run.evaluation.micro_batch_size,
        data_parallel_rank=dp_group.rank,
        data_parallel_size=dp_group.size,
        batch_sizes=BatchSizes.constant(run.evaluation.samples),
    )


def compare_identity(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """List how the data of a checkpoint differs from the run's; empty if the order can continue."""
    differences = []
    for name in dict.fromkeys([*saved, *current]):
        saved_value, current_value = saved.get(name), current.get(name)
        if name == "paths" or saved_value == current_value:
            continue
        if name == "files" and len(saved_value or ()) == len(current_value or ()):
            paths = current.get("paths", ())
            for i, (saved_fingerprint, fingerprint, path) in enumerate(
                zip(saved_value, current_value, paths, strict=True), 1
            ):
                if saved_fingerprint != fingerprint:
                    differences.append(f"data file {i}, {path}, has other content")
        elif name == "files":
            differences.append(
                f"{len(saved_value or ())} data files in the checkpoint ({_list_paths(saved)}), "
                f"{len(current_value)} now ({_list_paths(current)})"
            )
        else:
            differences.append(f"{name}: {saved_value} in the checkpoint, {current_value} now")
    return differences


def _list_paths(identity: Mapping[str, Any]) -> str:
    return ", ".join(identity.get("paths", ())) or "unnamed"


_RANK_OUTPUT = "output of one rank, which no other rank reads"
_CONTENT = "files compared by content, which may have other names on other machines"

#: Options that may differ between ranks, and why; all others must be equal.
MAY_DIFFER: Mapping[str, str] = {
    "tensorboard-dir": _RANK_OUTPUT,
    "wandb-save-dir": _RANK_OUTPUT,
    "metrics-file": _RANK_OUTPUT,
    "profile-dir": _RANK_OUTPUT,
    "memory-snapshot-path": _RANK_OUTPUT,
    "progress": "the appearance of terminal output",
    "data-cache-path": "a folder of each machine, for sample indices that every rank can build",
    "num-workers": "prefetch threads; a machine with fewer cores may have fewer",
    "data-path": _CONTENT,
    "train-data-path": _CONTENT,
    "valid-data-path": _CONTENT,
    "test-data-path": _CONTENT,
    "data-args-path": _CONTENT,
    "per-split-data-args-path": _CONTENT,
    "tokenizer-model": _CONTENT,
    "merge-file": _CONTENT,
}


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """Vocabulary and token files of a run.

    Args:
        vocabulary: the tokenizer's vocabulary.
        token_files: the opened files of each split.
    """

    vocabulary: Vocabulary
    token_files: TokenFiles

    def start_facts(self, run: ResolvedRun) -> StartFacts:
        """Return the values that must be equal on all ranks of a run."""
        unresolved = run.config if run.unresolved is None else run.unresolved
        return StartFacts(
            values={
                **option_values(run.config, leave_out=MAY_DIFFER),
                **self._data_values(sft=run.config.data.sft),
                **versions(),
            },
            before_resolving=option_values(unresolved, leave_out=MAY_DIFFER),
        )

    def _data_values(self, *, sft: bool) -> dict[str, str]:
        """Return digests of tokenizer and data, independent of file names.

        Args:
            sft: whether the token files have masks.
        """
        recorded = {k: v for k, v in self.vocabulary.tokenizer.items() if k != "model"}
        values = {
            "the tokenizer's digest": _short_digest(json.dumps(recorded, sort_keys=True)),
            "the number of token ids": str(self.vocabulary.size),
        }
        for name, (split, sources) in self.token_files.items():
            if split.path.weights is not None:
                weights = " ".join(map(str, split.path.weights))
                values[f"the weights of the {name} data"] = weights
            for number, source in enumerate(sources, 1):
                # A shared path has the same files in every split.
                role = "data" if split.split_index is not None else f"{name} data"
                values[f"the digest of {role} file {number}"] = source.fingerprint[:16]
                if sft:
                    values[f"the digest of {role} file {number}'s mask"] = _mask_digest(source)
        return values


def read_inputs(run: ResolvedRun) -> RunInputs:
    """Read the inputs of a run.

    Raises:
        ValueError: a file is missing or damaged, or was written with another tokenizer.
    """
    vocabulary = read_vocabulary(run.config.tokenizer, prefixes(run.config.data))
    return RunInputs(vocabulary=vocabulary, token_files=open_token_files(run.config.data))


def _mask_digest(source: IndexedDataset) -> str:
    try:
        return IndexedDataset(mask_prefix(source.prefix)).fingerprint[:16]
    except ValueError:  # reported when the data set is built
        return "none"


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
