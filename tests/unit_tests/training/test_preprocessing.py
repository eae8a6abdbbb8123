# SPDX-License-Identifier: Apache-2.0
"""Input files of every kind are read completely, in order, and resume at any block."""

import gzip
import json
import random
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest

from megatron.training.data.documents import (
    Kind,
    Tally,
    find_inputs,
    read_blocks,
    read_documents,
    read_records,
)

TEXTS = [f"{number} " + "wörd " * (number * 7 % 40) for number in range(60)]


def lines(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def write_table(path, columns, **options):
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)


@pytest.fixture
def folder(tmp_path):
    """Create a folder with every kind of file; its documents are TEXTS in order of file name."""
    root = tmp_path / "in"
    (root / "deeper").mkdir(parents=True)
    (root / "a.jsonl").write_bytes(lines(TEXTS[:20]))
    (root / "b.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS[20:35])))
    write_table(root / "c.parquet", {"text": TEXTS[35:50], "n": range(15)}, row_group_size=4)
    (root / "d.txt").write_text(TEXTS[50], encoding="utf-8")
    (root / "deeper" / "a.json").write_bytes(lines(TEXTS[51:]))
    (root / "README.md").write_text("not a document")
    (root / ".hidden.txt").write_text("not a document")
    return root


def test_folder_expands_to_supported_files_in_order(folder):
    inputs = find_inputs([folder])
    assert [file.path.removeprefix(f"{folder}/") for file in inputs.files] == [
        "a.jsonl", "b.jsonl.gz", "c.parquet", "d.txt", "deeper/a.json",
    ]  # fmt: skip
    assert [file.kind for file in inputs.files] == [
        Kind.LINES, Kind.GZIP_LINES, Kind.ROWS, Kind.TEXT, Kind.LINES,
    ]  # fmt: skip
    assert inputs.left_out == (f"{folder}/README.md",)
    assert f"left out 1 files of other kinds (first: {folder}/README.md)" in (
        inputs.describe_left_out()
    )
    assert inputs.total_bytes == sum(file.size for file in inputs.files)
    assert list(read_documents([folder], Tally())) == TEXTS


def test_patterns_and_names_keep_their_order(folder):
    inputs = find_inputs([f"{folder}/d*.txt", f"{folder}/**/*.json", f"{folder}/a.jsonl"])
    assert [file.path.rpartition("/")[2] for file in inputs.files] == ["d.txt", "a.json", "a.jsonl"]
    for names, message in [
        ([f"{folder}/*.csv", f"{folder}/none"], r"no such input file: .*\*\.csv, .*none"),
        ([folder, f"{folder}/a.*"], r"named twice as --input: .*a\.jsonl"),
    ]:
        with pytest.raises(ValueError, match=message):
            find_inputs(names)
    (folder / "x.jsonl.zst").write_bytes(b"")
    with pytest.raises(ValueError, match=r"x\.jsonl\.zst: unpack it first \(zstd -d\)"):
        find_inputs([folder / "x.jsonl.zst"])


@pytest.mark.parametrize("block_bytes", [1, 50, 400, 1 << 20])
def test_reading_resumes_at_the_end_of_any_block(folder, block_bytes):
    files = find_inputs([folder]).files

    def texts(blocks):
        return [r.values[0] for b in blocks for r in read_records(b, Tally(), keys=["text"])]

    def locations(blocks):
        return [r.location for b in blocks for r in read_records(b, Tally(), keys=["text"])]

    all_blocks = list(read_blocks(files, columns=["text"], block_bytes=block_bytes))
    assert texts(all_blocks) == TEXTS
    assert [location.rpartition(":")[2] for location in locations(all_blocks)[18:37]] == [
        "19", "20", *map(str, range(1, 16)), "1", "2",
    ]  # fmt: skip
    byte_counts = [block.read_bytes for block in all_blocks]
    assert byte_counts == sorted(byte_counts)
    assert byte_counts[-1] == sum(file.size for file in files)
    for number, block in enumerate(all_blocks):
        remaining = list(
            read_blocks(files, columns=["text"], block_bytes=block_bytes, start=block.end)
        )
        assert texts(remaining) == texts(all_blocks[number + 1 :])
        assert locations(remaining) == locations(all_blocks[number + 1 :])


def test_too_long_lines_are_skipped_across_blocks(tmp_path):
    rng = random.Random(2)
    for _ in range(60):
        texts = ["x" * rng.choice([1, 5, 90, 400, 3000]) for _ in range(12)]
        content = lines(texts)
        (tmp_path / "a.jsonl").write_bytes(content if rng.random() < 0.5 else content[:-1])
        block_bytes, longest = rng.choice([1, 7, 64, 1000]), rng.choice([13, 100, 500])
        files = find_inputs([tmp_path / "a.jsonl"]).files
        options = {"max_document_bytes": longest, "block_bytes": block_bytes}

        def records(blocks, tally, longest=longest):
            return [
                (r.values[0], r.location)
                for block in blocks
                for r in read_records(block, tally, keys=["text"], max_document_bytes=longest)
            ]

        tally = Tally()
        blocks = list(read_blocks(files, columns=["text"], **options))
        actual = records(blocks, tally)
        expected = [
            (text, f"{tmp_path}/a.jsonl:{number}")
            for number, text in enumerate(texts, start=1)
            if len(text) + 12 <= longest
        ]
        assert actual == expected
        assert tally.rejected.total() == len(texts) - len(expected)
        for number, block in enumerate(blocks):
            remaining = read_blocks(files, columns=["text"], start=block.end, **options)
            assert records(remaining, Tally()) == records(blocks[number + 1 :], Tally())
        largest_chunk = max(len(chunk.content) for block in blocks for chunk in block.chunks)
        assert largest_chunk <= longest + 2 * max(block_bytes, 1) + 3


def test_parquet_rows_without_text_are_rejected(tmp_path):
    write_table(
        tmp_path / "a.parquet",
        {"n": [1, 2], "raw": [b"ok", b"\xff"], "part": ["a", None], "big": ["x", "y" * 99]},
    )
    for key, expected, rejected in [
        ("n", [], {"with a 'n' that is not text": 2}),
        ("raw", ["ok"], {"not UTF-8": 1}),
        ("part", ["a"], {"with a 'part' that is not text": 1}),
    ]:
        tally = Tally()
        assert list(read_documents([tmp_path / "a.parquet"], tally, key=key)) == expected
        assert dict(tally.rejected) == rejected
    with pytest.raises(ValueError, match=r"has no column text: it has n, raw, part, big"):
        list(read_documents([tmp_path / "a.parquet"], Tally()))
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no table")
    with pytest.raises(ValueError, match=r"cannot read .*b\.parquet as Parquet"):
        list(read_documents([tmp_path / "b.parquet"], Tally()))


def test_long_parquet_rows_are_split_into_small_blocks(tmp_path):
    write_table(tmp_path / "a.parquet", {"text": ["x" * 1000] * 300})
    files = find_inputs([tmp_path / "a.parquet"]).files
    blocks = list(read_blocks(files, columns=["text"], block_bytes=10_000))
    assert sum(len(chunk.content["text"]) for block in blocks for chunk in block.chunks) == 300
    assert max(block.size for block in blocks) < 15_000


def test_parquet_row_group_is_read_in_batches(tmp_path):
    texts = [random.Random(number).randbytes(5000).hex() for number in range(6000)]
    write_table(
        tmp_path / "a.parquet", {"text": texts}, row_group_size=6000, write_batch_size=20,
        use_dictionary=False,
    )  # fmt: skip
    # In a fresh process: memory pools that earlier reads filled would hide the peak.
    script = """
import sys
import pyarrow.parquet
from megatron.training.data.documents import Tally, read_documents

def peak():
    return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmHWM'))

before = peak()
assert sum(1 for _ in read_documents(sys.argv[1:], Tally())) == 6000
print(peak() - before)
"""
    process = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "a.parquet")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) < 75_000, "reading a row group of 60 MB needs too much memory (kB)"


def test_damaged_gzip_file_is_an_error(tmp_path):
    archive = gzip.compress(lines(TEXTS))
    for damaged in (archive[:-30], b"no gzip", archive[:200] + b"\0\0\0\0" + archive[204:]):
        (tmp_path / "a.jsonl.gz").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a\.jsonl\.gz is damaged"):
            list(read_documents([tmp_path / "a.jsonl.gz"], Tally()))


def test_gzip_padding_between_members_is_limited(tmp_path):
    file, member = tmp_path / "a.jsonl.gz", gzip.compress(lines(TEXTS))
    file.write_bytes(member + bytes(512) + member)
    assert len(list(read_documents([file], Tally()))) == 2 * len(TEXTS)
    with file.open("ab") as stream:
        stream.truncate(len(member) + (2 << 30))  # sparse; reading byte by byte would take minutes
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz is damaged: more than 65,536 bytes"):
        list(read_documents([file], Tally()))
