# SPDX-License-Identifier: Apache-2.0
"""Faults of data files: refused in one line or counted, never silent."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets import IndexedDataset
from megatron.training.preprocess_data import PreprocessConfig, preprocess
from tests.support.ranks import start_ranks

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "ünd", "so", "weiter"]


def write_corpus(path: Path, *, lines: int) -> None:
    """Write JSON lines of random words; every tenth line is not JSON."""
    choose = random.Random(4)
    with open(path, "w", encoding="utf-8") as stream:
        for number in range(lines):
            text = " ".join(choose.choices(WORDS, k=choose.randrange(1, 30)))
            stream.write("oops\n" if number % 10 == 3 else json.dumps({"text": text}) + "\n")


def preprocess_corpus(folder: str, *, resume: bool, **options: Any) -> Any:
    """Preprocess the corpus of a folder in small blocks with frequent commits."""
    config = PreprocessConfig(
        input=(f"{Path(folder).parent}/corpus",),
        output_prefix=f"{folder}/data",
        tokenizer_type="byte",
        append_eod=True,
        resume=resume,
    )
    return preprocess(config, commit_bytes=4000, block_bytes=700, **options)


def preprocess_and_die(rank: int, world: int, folder: str, end: int | None) -> list[int]:
    """Preprocess, and kill this process at call number `end` of a C function.

    Returns:
        The number of calls, and the numbers of the calls that write to disk, if not killed.
    """
    calls, disk_calls = 0, []

    def count(frame: object, event: str, function: object) -> None:
        nonlocal calls
        if event == "c_call":
            calls += 1
            if end is None and function in (os.fsync, os.replace, os.unlink):
                disk_calls.append(calls)
            if calls == end:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)
    try:
        preprocess_corpus(folder, resume=False)
    finally:
        sys.setprofile(None)
    return [calls, *disk_calls]


def test_preprocess_killed_at_20_points_resumes_to_same_bytes(tmp_path):
    """Kill at random calls, at calls that write to disk, and right after the last such calls."""
    points = 20
    (tmp_path / "corpus").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        write_corpus(tmp_path / "corpus" / name, lines=150)
    clean = tmp_path / "clean"
    with start_ranks(preprocess_and_die, 1, str(clean), None, init=False) as ranks:
        ((calls, *disk_calls),) = ranks.values(timeout=60)
    expected = {path.name: path.read_bytes() for path in clean.iterdir()}
    assert sorted(expected) == ["data.bin", "data.idx", "data.json"]
    choose = random.Random(11)
    ends = [choose.randrange(calls) for _ in range(points // 2)]
    ends += [choose.choice(disk_calls) for _ in range(points // 4)]
    # The last calls name the files: a kill between them must not leave half a pair for good.
    ends += [choose.choice(disk_calls[-8:]) + 1 for _ in range(points - len(ends))]
    num_resumed = 0
    for number, end in enumerate(ends):
        folder = tmp_path / f"killed{number}"
        with start_ranks(preprocess_and_die, 1, str(folder), end, init=False) as ranks:
            (outcome,) = ranks.outcomes(timeout=60)
        assert outcome.exit_code == -signal.SIGKILL, f"call {end} of {calls}: {outcome}"
        progress: list[int] = []
        preprocess_corpus(
            str(folder),
            resume=True,
            report=lambda *, documents, **kwargs: progress.append(documents),  # noqa: B023
        )
        num_resumed += not progress or progress[0] > 20
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected, end
        shutil.rmtree(folder)
    assert num_resumed >= points // 2, "most kills must come after a commit"


def test_resume_refuses_other_inputs_and_options(tmp_path):
    (tmp_path / "corpus").mkdir()
    write_corpus(tmp_path / "corpus" / "a.jsonl", lines=200)
    folder = tmp_path / "out"

    def stop(*, documents: int, **kwargs: int) -> None:
        if documents > 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preprocess_corpus(str(folder), resume=False, report=stop)
    assert not (folder / "data.idx").exists()
    with open(tmp_path / "corpus" / "a.jsonl", "a") as stream:
        stream.write("{}\n")
    with pytest.raises(ValueError, match=r"--resume.*a\.jsonl"):
        preprocess_corpus(str(folder), resume=True)
    config = PreprocessConfig(
        input=(f"{tmp_path}/corpus",), output_prefix=f"{folder}/data", tokenizer_type="byte",
        resume=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match="--append-eod"):
        preprocess(config)
    assert preprocess_corpus(str(folder), resume=False)[f"{folder}/data"].documents == 180


def test_100_mb_line_is_counted_without_being_read_at_once(tmp_path):
    path = tmp_path / "a.jsonl"
    with open(path, "wb") as stream:
        stream.write(b'{"text": "before"}\n{"text": "')
        for _ in range(100):
            stream.write(b"x" * (1 << 20))
        stream.write(b'"}\n{"text": "after"}\n')
    limit = 1 << 20
    # A plain run's memory plus a few blocks, far less than the line.
    script = (
        "import sys; from megatron.training.preprocess_data import _main; _main(sys.argv[1:]); "
        "print(*[line for line in open('/proc/self/status') if line.startswith('VmHWM')])"
    )
    line = [sys.executable, "-c", script, "--tokenizer-type", "byte", "--input", str(path)]
    line += ["--output-prefix", str(tmp_path / "x"), "--max-document-bytes", str(limit)]
    process = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    message = f"rejected 1 lines: 1 over --max-document-bytes {limit} (first: {path}:2)"
    assert message in process.stdout
    assert int(process.stdout.split()[-2]) < 80_000, "kilobytes at the peak"
    dataset = IndexedDataset(tmp_path / "x")
    assert [bytes(dataset.get(i).astype(np.uint8)) for i in range(2)] == [b"before", b"after"]
