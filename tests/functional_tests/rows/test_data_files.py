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

from megatron.cli.errors import ExitCode
from megatron.core.datasets.indexed_dataset import HEADER, IndexedDataset
from megatron.training.preprocess_data import PreprocessConfig, preprocess
from tests.functional_tests.small_run import flags, run_in_process, write_tokens
from tests.support.ranks import start_ranks


@pytest.fixture
def prefix(tmp_path):
    return write_tokens(tmp_path / "tokens")


def refused(capsys, prefix, *texts, before_training=True):
    """Train on the files and expect one line on stderr that contains `texts`."""
    code = run_in_process(flags(prefix))
    out, err = capsys.readouterr()
    assert code == ExitCode.USER_ERROR, err
    assert err.startswith("pretrain_gpt: ")
    assert err.count("\n") == 1, err
    assert not (before_training and "iteration" in out)
    for text in texts:
        assert text in err


def overwrite(path: Path, offset: int, content: bytes) -> None:
    """Overwrite bytes of a file."""
    whole = bytearray(path.read_bytes())
    whole[offset : offset + len(content)] = content
    path.write_bytes(whole)


def test_truncated_files_and_wrong_headers_are_refused(prefix, capsys):
    idx, tokens = prefix.with_suffix(".idx"), prefix.with_suffix(".bin")
    index, content = idx.read_bytes(), tokens.read_bytes()
    for damaged, text in [
        (b"not" + index[3:], "magic b'notDIDX"),
        (index[:9] + b"\x02" + index[10:], "version 2; expected 1"),
        (index[:20], "expected a header of 34 bytes"),
        (index[:-9], f"in a file of {len(index) - 9} bytes; expected {len(index)} bytes"),
    ]:
        idx.write_bytes(damaged)
        refused(capsys, prefix, str(idx), text)
    idx.write_bytes(index)
    tokens.write_bytes(content[:-10])
    refused(capsys, prefix, str(tokens), "truncated", f"expected the {len(content)} bytes")
    tokens.unlink()
    refused(capsys, prefix, str(tokens), "no such file")


def test_index_with_wrong_offsets_or_counts_is_refused(prefix, capsys):
    idx = prefix.with_suffix(".idx")
    whole = idx.read_bytes()
    sequences = len(IndexedDataset(prefix))
    offsets_at = HEADER.size + 4 * sequences
    for offset, content, text in [
        (18, (1 << 62).to_bytes(8, "little"), f"{1 << 62} sequences"),
        (26, (1 << 63).to_bytes(8, "little"), f"{1 << 63} document entries"),
        (HEADER.size, (-5).to_bytes(4, "little", signed=True), "sequence 0 has -5 tokens"),
        (HEADER.size, (1 << 30).to_bytes(4, "little"), "starts at byte"),
        (offsets_at - 4, (1 << 30).to_bytes(4, "little"), "truncated"),
        (offsets_at + 8, (1 << 40).to_bytes(8, "little"), f"starts at byte {1 << 40}"),
        (len(whole) - 8, (1 << 50).to_bytes(8, "little"), f"{1 << 50}]"),
    ]:
        overwrite(idx, offset, content)
        refused(capsys, prefix, str(prefix), text)
        idx.write_bytes(whole)


def test_out_of_vocabulary_token_is_reported_with_document(prefix, capsys):
    dataset = IndexedDataset(prefix)
    wrong = int(dataset.byte_offsets[17]) + 2 * dataset.dtype.itemsize
    overwrite(prefix.with_suffix(".bin"), wrong, (60_000).to_bytes(2, "little"))
    texts = ("token id 60000", "document 17", "vocabulary size 61")
    refused(capsys, prefix, *texts, before_training=False)


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
    with pytest.raises(ValueError, match=r"--resume: the input .*a\.jsonl was .* bytes.*and is"):
        preprocess_corpus(str(folder), resume=True)
    config = PreprocessConfig(
        input=(f"{tmp_path}/corpus",), output_prefix=f"{folder}/data", tokenizer_type="byte",
        resume=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match="--append-eod was True and is False"):
        preprocess(config)
    assert preprocess_corpus(str(folder), resume=False)[f"{folder}/data"].documents == 180


LINES = [
    (b'{"text": "good"}\n', None),
    (b'{"text": "cut\n', "not JSON"),
    (b'{"text": "\xff"}\n', "not UTF-8"),
    (b'{"body": "x"}\n', "without key 'text'"),
    (b'{"text": "good too"}\n', None),
]


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run preprocess_data with the byte tokenizer, in a process of its own."""
    line = [sys.executable, "-m", "megatron.training.preprocess_data", "--tokenizer-type", "byte"]
    return subprocess.run([*line, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def test_bad_lines_are_counted_or_stop_a_strict_run(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(line for line, _ in LINES))
    process = command("--input", path, "--output-prefix", tmp_path / "x")
    assert process.returncode == 0, process.stderr
    for number, (_, reason) in enumerate(LINES, start=1):
        assert (f"1 {reason} (first: {path}:{number})" in process.stdout) == (reason is not None)
    assert "rejected 3 lines: " in process.stdout
    assert IndexedDataset(tmp_path / "x").num_documents == 2
    process = command("--input", path, "--output-prefix", tmp_path / "y", "--strict")
    assert process.returncode == ExitCode.USER_ERROR
    assert f"{path}:2: not JSON; " in process.stderr
    assert process.stderr.count("\n") == 1
    assert not list(tmp_path.glob("y*"))


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
