# SPDX-License-Identifier: Apache-2.0
"""What a run reads before it meets the other ranks: vocabulary, and the index of token files.

And what all its ranks must have in common, which they compare before they make process groups.
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

_OWN_OUTPUT = "where a rank writes what no rank reads again"
_CONTENT = "files whose content is compared, which may have other names on other machines"

#: Options that may differ between ranks, and why; all others must be the same.
MAY_DIFFER: Mapping[str, str] = {
    "tensorboard-dir": _OWN_OUTPUT,
    "wandb-save-dir": _OWN_OUTPUT,
    "metrics-file": _OWN_OUTPUT,
    "profile-dir": _OWN_OUTPUT,
    "memory-snapshot-path": _OWN_OUTPUT,
    "progress": "how the lines of a terminal look",
    "data-cache-path": "a folder of each machine, for sample indices that every rank can make",
    "num-workers": "threads that read ahead; a machine with fewer cores may have fewer",
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
        vocabulary: of the tokenizer.
        token_files: of each split.
    """

    vocabulary: Vocabulary
    token_files: TokenFiles

    def start_facts(self, run: ResolvedRun) -> StartFacts:
        """Return what all ranks of a run must have in common."""
        before = run.config if run.unresolved is None else run.unresolved
        return StartFacts(
            values={
                **option_values(run.config, leave_out=MAY_DIFFER),
                **self._data_values(sft=run.config.data.sft),
                **versions(),
            },
            before_resolving=option_values(before, leave_out=MAY_DIFFER),
        )

    def _data_values(self, *, sft: bool) -> dict[str, str]:
        """Return what identifies tokenizer and data, whatever their files are called.

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
        ValueError: a file is missing or damaged, or written with another tokenizer.
    """
    vocabulary = read_vocabulary(run.config.tokenizer, prefixes(run.config.data))
    return RunInputs(vocabulary=vocabulary, token_files=open_token_files(run.config.data))


def _mask_digest(source: IndexedDataset) -> str:
    try:
        return IndexedDataset(mask_prefix(source.prefix)).fingerprint[:16]
    except ValueError:  # building the data set says so
        return "none"


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
