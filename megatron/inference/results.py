# SPDX-License-Identifier: Apache-2.0
"""What was generated for one prompt, and the JSON file of all of them."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.untrusted_files import replace_file


@dataclass(frozen=True, kw_only=True)
class Result:
    """One prompt and its continuation.

    Args:
        prompt: the text that was given.
        prompt_ids: the tokens it became.
        text: the continuation, without the end-of-document token.
        ids: the generated tokens, the end-of-document token included.
        logprobs: the model's own log-probability of each of `ids` (natural logarithm, before
            temperature and filters).
        finish_reason: "stop" at the end of the document, "length" at the token limit.
    """

    prompt: str
    prompt_ids: tuple[int, ...]
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str


def write_json(path: str | Path, results: Sequence[Result]) -> None:
    """Write a JSON list, one object and one line per result; the file appears whole or not at all.

    Raises:
        ValueError: the file cannot be written.
    """
    path = Path(path)
    lines = (json.dumps(dataclasses.asdict(r), ensure_ascii=False) for r in results)
    text = "[\n" + ",\n".join(lines) + "\n]"
    try:
        replace_file(path, text + "\n")
    except OSError as error:
        raise ValueError(f"--output-json {path} cannot be written: {error.strerror}") from None


def check_json_path(path: str | Path) -> None:
    """Make the folder of a JSON file to be written, so that a bad path is known before the work.

    Raises:
        ValueError: the folder cannot be made or written to, or `path` is a folder.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"--output-json {path} is a folder: name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--output-json {path}: cannot make the folder {path.parent}: {error.strerror}"
        ) from None
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"--output-json {path}: no permission to write in {path.parent}")
