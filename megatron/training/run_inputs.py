# SPDX-License-Identifier: Apache-2.0
"""Inputs of a run, read before it joins the other ranks: vocabulary and token file indices.

Also the values that must be equal on all ranks, compared before process groups are created.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.cli.rank_agreement import StartFacts, option_values, versions
from megatron.core.datasets.chat_dataset import mask_prefix
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.training.config.resolve import ResolvedRun
from megatron.training.data.data_paths import prefixes
from megatron.training.data.data_sets import TokenFiles, open_token_files
from megatron.training.data.vocabulary import Vocabulary, read_vocabulary

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
                data = "data" if split.split_index is not None else f"{name} data"
                values[f"the digest of {data} file {number}"] = source.fingerprint[:16]
                if sft:
                    values[f"the digest of {data} file {number}'s mask"] = _mask_digest(source)
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
