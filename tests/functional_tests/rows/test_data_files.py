# SPDX-License-Identifier: Apache-2.0
"""Faults of data files, by row of the fault table: refused in one line or counted, never silent."""

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
from tests.functional_tests.small_run import flags, run_here, write_tokens
from tests.support.ranks import start_ranks


@pytest.fixture
def prefix(tmp_path):
    return write_tokens(tmp_path / "tokens")


def refused(capsys, prefix, *texts, before_training=True):
    """Train on the files and expect one line on stderr with these texts."""
    code = run_here(flags(prefix))
    out, err = capsys.readouterr()
    assert code == ExitCode.USER_ERROR, err
    assert err.startswith("pretrain_gpt: ")
    assert err.count("\n") == 1, err
    assert not (before_training and "iteration" in out)
    for text in texts:
        assert text in err


def overwrite(path: Path, offset: int, content: bytes) -> None:
    """Change some bytes of a file."""
    whole = bytearray(path.read_bytes())
    whole[offset : offset + len(content)] = content
    path.write_bytes(whole)


def test_truncated_files_wrong_magic_and_version(prefix, capsys):
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


def test_an_index_that_points_past_the_tokens_or_counts_wrongly(prefix, capsys):
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


def test_a_token_outside_the_vocabulary_names_its_document(prefix, capsys):
    data = IndexedDataset(prefix)
    wrong = int(data.byte_offsets[17]) + 2 * data.dtype.itemsize
    overwrite(prefix.with_suffix(".bin"), wrong, (60_000).to_bytes(2, "little"))
    texts = ("token id 60000", "document 17", "vocabulary size 61")
    refused(capsys, prefix, *texts, before_training=False)


WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "ünd", "so", "weiter"]


def write_corpus(path: Path, *, lines: int) -> None:
    """Write JSON lines of some words each; one in ten is not one."""
    choose = random.Random(4)
    with open(path, "w", encoding="utf-8") as stream:
        for number in range(lines):
            text = " ".join(choose.choices(WORDS, k=choose.randrange(1, 30)))
            stream.write("oops\n" if number % 10 == 3 else json.dumps({"text": text}) + "\n")


def work(folder: str, *, resume: bool, **options: Any) -> Any:
    """Preprocess the corpus in a folder in small blocks, with a commit after every few."""
    config = PreprocessConfig(
        input=(f"{Path(folder).parent}/corpus",),
        output_prefix=f"{folder}/data",
        tokenizer_type="byte",
        append_eod=True,
        resume=resume,
    )
    return preprocess(config, commit_bytes=4000, block_bytes=700, **options)


def work_and_die(rank: int, world: int, folder: str, end: int | None) -> list[int]:
    """Work, and be killed at the call number `end` of a C function.

    Returns:
        How many calls there are and the numbers of those that reach the disk, if it lived.
    """
    calls, reaching = 0, []

    def count(frame: object, event: str, function: object) -> None:
        nonlocal calls
        if event == "c_call":
            calls += 1
            if end is None and function in (os.fsync, os.replace, os.unlink):
                reaching.append(calls)
            if calls == end:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)
    try:
        work(folder, resume=False)
    finally:
        sys.setprofile(None)
    return [calls, *reaching]


def test_preprocess_killed_at_20_points_resumes_to_same_bytes(tmp_path):
    """Kill at random calls, at those that reach the disk and right after the last of these."""
    points = 20
    (tmp_path / "corpus").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        write_corpus(tmp_path / "corpus" / name, lines=150)
    clean = tmp_path / "clean"
    with start_ranks(work_and_die, 1, str(clean), None, init=False) as ranks:
        ((calls, *reaching),) = ranks.values(timeout=60)
    expected = {path.name: path.read_bytes() for path in clean.iterdir()}
    assert sorted(expected) == ["data.bin", "data.idx", "data.json"]
    choose = random.Random(11)
    ends = [choose.randrange(calls) for _ in range(points // 2)]
    ends += [choose.choice(reaching) for _ in range(points // 4)]
    # The last ones name the files: a kill between them must not leave half a pair for good.
    ends += [choose.choice(reaching[-8:]) + 1 for _ in range(points - len(ends))]
    taken_up = 0
    for number, end in enumerate(ends):
        folder = tmp_path / f"killed{number}"
        with start_ranks(work_and_die, 1, str(folder), end, init=False) as ranks:
            (found,) = ranks.outcomes(timeout=60)
        assert found.exit_code == -signal.SIGKILL, f"call {end} of {calls}: {found}"
        seen: list[int] = []
        work(
            str(folder),
            resume=True,
            report=lambda *, documents, **rest: seen.append(documents),  # noqa: B023
        )
        taken_up += not seen or seen[0] > 20
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected, end
        shutil.rmtree(folder)
    assert taken_up >= points // 2, "most kills come after a commit: there was much to take up"


def test_resume_refuses_other_inputs_and_options(tmp_path):
    (tmp_path / "corpus").mkdir()
    write_corpus(tmp_path / "corpus" / "a.jsonl", lines=200)
    folder = tmp_path / "out"

    def stop(*, documents: int, **rest: int) -> None:
        if documents > 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work(str(folder), resume=False, report=stop)
    assert not (folder / "data.idx").exists()
    with open(tmp_path / "corpus" / "a.jsonl", "a") as stream:
        stream.write("{}\n")
    with pytest.raises(ValueError, match=r"--resume: the input .*a\.jsonl was .* bytes.*and is"):
        work(str(folder), resume=True)
    config = PreprocessConfig(
        input=(f"{tmp_path}/corpus",), output_prefix=f"{folder}/data", tokenizer_type="byte",
        resume=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match="--append-eod was True and is False"):
        preprocess(config)
    assert work(str(folder), resume=False)[f"{folder}/data"].documents == 180


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
    done = command("--input", path, "--output-prefix", tmp_path / "x")
    assert done.returncode == 0, done.stderr
    for number, (_, reason) in enumerate(LINES, start=1):
        assert (f"1 {reason} (first: {path}:{number})" in done.stdout) == (reason is not None)
    assert "rejected 3 lines: " in done.stdout
    assert IndexedDataset(tmp_path / "x").num_documents == 2
    done = command("--input", path, "--output-prefix", tmp_path / "y", "--strict")
    assert done.returncode == ExitCode.USER_ERROR
    assert f"{path}:2: not JSON; " in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("y*"))


def test_100_mb_line_is_counted_without_being_read_at_once(tmp_path):
    path = tmp_path / "a.jsonl"
    with open(path, "wb") as stream:
        stream.write(b'{"text": "before"}\n{"text": "')
        for _ in range(100):
            stream.write(b"x" * (1 << 20))
        stream.write(b'"}\n{"text": "after"}\n')
    limit = 1 << 20
    # Whatever a plain run needs, and some blocks more: far less than the line.
    script = (
        "import sys; from megatron.training.preprocess_data import _main; _main(sys.argv[1:]); "
        "print(*[line for line in open('/proc/self/status') if line.startswith('VmHWM')])"
    )
    line = [sys.executable, "-c", script, "--tokenizer-type", "byte", "--input", str(path)]
    line += ["--output-prefix", str(tmp_path / "x"), "--max-document-bytes", str(limit)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = f"rejected 1 lines: 1 over --max-document-bytes {limit} (first: {path}:2)"
    assert said in done.stdout
    assert int(done.stdout.split()[-2]) < 80_000, "kilobytes at the peak"
    data = IndexedDataset(tmp_path / "x")
    assert [bytes(data.get(i).astype(np.uint8)) for i in range(2)] == [b"before", b"after"]
