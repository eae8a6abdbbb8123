# SPDX-License-Identifier: Apache-2.0
"""Text files to token files: documents in order, rejected lines reported, bounded memory."""

import io
import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from megatron.cli.tokenizers import ByteTokenizer, NullTokenizer, build_tokenizer, train_bpe
from megatron.core.datasets import IndexedDataset
from megatron.training.data.documents import Tally, read_documents
from megatron.training.data.progress_display import show_progress
from megatron.training.preprocess_data import PreprocessConfig, _main, preprocess

TEXTS = [f"document {number}: " + "é\n" * (number % 7) for number in range(50)]


def write_lines(path, texts):
    path.write_bytes(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts))
    return str(path)


def config_for(tmp_path, *inputs, **options):
    options.setdefault("tokenizer_type", "byte")
    return PreprocessConfig(input=inputs, output_prefix=str(tmp_path / "out" / "data"), **options)


def run(*arguments, python=("-m",)):
    command = [sys.executable, *python, "megatron.training.preprocess_data", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("append_eod", [False, True])
@pytest.mark.parametrize("block_bytes", [1, 100, 1 << 20])
def test_documents_round_trip_through_token_files(tmp_path, append_eod, block_bytes):
    part1 = write_lines(tmp_path / "a.jsonl", TEXTS[:30])
    part2 = write_lines(tmp_path / "b.jsonl", TEXTS[30:])
    (tmp_path / "c.txt").write_text("one file,\n\none document\n", encoding="utf-8")
    config = config_for(tmp_path, part1, part2, str(tmp_path / "c.txt"), append_eod=append_eod)
    summary = preprocess(config, block_bytes=block_bytes)[config.output_prefix]
    dataset = IndexedDataset(config.output_prefix)
    ending = [256] if append_eod else []
    expected = [list(text.encode()) + ending for text in [*TEXTS, "one file,\n\none document\n"]]
    assert [dataset.get(number).tolist() for number in range(len(dataset))] == expected
    assert dataset.dtype == np.uint16
    assert dataset.num_documents == summary.documents == 51
    assert dataset.num_tokens == summary.tokens
    description = json.loads((tmp_path / "out" / "data.json").read_text())
    assert description["tokenizer"] == {
        "type": "byte", "model": None, "fingerprint": "byte-257", "vocab_size": 257, "eod": 256,
        "special_tokens": {"before": [], "after": []},
    }  # fmt: skip
    assert (description["documents"], description["tokens"]) == (51, dataset.num_tokens)
    assert description["append_eod"] == append_eod
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "data.bin", "data.idx", "data.json",
    ]  # fmt: skip


def test_memory_is_bounded_by_the_block_size(tmp_path):
    batches = []

    class Watched(NullTokenizer):
        def encode_batch(self, texts):
            batches.append(sum(map(len, texts)))
            return super().encode_batch(texts)

    texts = [" ".join(["7"] * number) for number in range(1, 50)]
    path = write_lines(tmp_path / "a.jsonl", texts)
    preprocess(config_for(tmp_path, path), tokenizer=Watched(9), block_bytes=200)
    assert len(batches) > 5
    assert max(batches) < 2 * 200 + max(map(len, texts))


def test_worker_count_sets_the_tokenizer_threads(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYON_NUM_THREADS", "9")
    path = write_lines(tmp_path / "a.jsonl", TEXTS[:1])
    train_bpe(TEXTS, 260, tmp_path / "tokenizer.json")
    arguments = ["--input", path, "--output-prefix", str(tmp_path / "x"), "--workers", "1"]
    _main([*arguments, "--tokenizer-model", str(tmp_path / "tokenizer.json")])
    assert os.environ["RAYON_NUM_THREADS"] == "1"


def test_large_vocabularies_use_32_bit_ids(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ["1 70000 2"])
    config = config_for(tmp_path, path, tokenizer_type="null", vocab_size=70_001)
    preprocess(config, tokenizer=build_tokenizer("null", vocab_size=70_001))
    dataset = IndexedDataset(config.output_prefix)
    assert dataset.dtype == np.int32
    assert dataset.get(0).tolist() == [1, 70000, 2]


BAD_LINES = [
    (b"{not json}\n", "not JSON"),
    (b"[" * 100_000 + b"\n", "not JSON"),
    (b"[1, 2]\n", "not a JSON object"),
    (b'{"body": "x"}\n', "without key 'text'"),
    (b'{"text": 5}\n', "with a 'text' that is not text"),
    (b'{"text": ""}\n', "empty"),
    (b'{"text": "\xff"}\n', "not UTF-8"),
    (b'{"text": "\\ud800"}\n', "with half a surrogate pair"),
    (b'{"text": "cut', "not JSON"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_invalid_line_is_counted_and_located(tmp_path, line, reason):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line)
    tally = Tally()
    assert list(read_documents([path], tally)) == ["good"]
    assert dict(tally.rejected) == {reason: 1}
    assert tally.documents == 1
    assert tally.read_bytes == path.stat().st_size
    assert tally.describe_rejected() == f"rejected 1 lines: 1 {reason} (first: {path}:3)"


def test_json_key_bom_and_plain_text_files_are_read(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"body": "x", "text": "y"}\n')
    assert list(read_documents([tmp_path / "a.jsonl"], Tally(), key="body")) == ["x"]
    (tmp_path / "a.txt").write_bytes(b"\xff")
    tally = Tally()
    assert list(read_documents([tmp_path / "a.txt"], tally)) == []
    assert dict(tally.rejected) == {"not UTF-8": 1}
    assert Tally().describe_rejected() == ""


def test_long_line_is_one_document(tmp_path):
    long = "x" * 3_000_000
    config = config_for(tmp_path, write_lines(tmp_path / "a.jsonl", [long, "y"]))
    preprocess(config, tokenizer=ByteTokenizer())
    assert IndexedDataset(config.output_prefix).lengths.tolist() == [3_000_000, 1]


def test_invalid_input_writes_nothing(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"oops\n")
    config = config_for(tmp_path, str(empty))
    with pytest.raises(ValueError, match=r"no document in .*1 not JSON"):
        preprocess(config, tokenizer=ByteTokenizer())
    with pytest.raises(ValueError, match=r"no such input file: .*none"):
        preprocess(config_for(tmp_path, str(tmp_path / "none")), tokenizer=ByteTokenizer())
    assert list((tmp_path / "out").iterdir()) == []


def test_all_contradicting_options_are_reported():
    with pytest.raises(ValueError, match=r"--workers 0.*--tokenizer-model.*--vocab"):
        PreprocessConfig(
            input=("a",), output_prefix="b", tokenizer_type="byte", workers=0,
            tokenizer_model="c", vocab_size=3,
        )  # fmt: skip


def test_append_eod_needs_an_eod_token(tmp_path):
    class Endless(ByteTokenizer):
        eod = None

    path = write_lines(tmp_path / "a.jsonl", ["x"])
    with pytest.raises(ValueError, match="no end-of-document token"):
        preprocess(config_for(tmp_path, path, append_eod=True), tokenizer=Endless())


def test_user_errors_exit_with_code_2_and_one_line(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "file").write_text("")
    for arguments, message in [
        (["--input", path, "--output-prefx", "x"], "did you mean --output-prefix"),
        (["--input", path, "--output-prefix", tmp_path / "x"], "needs --tokenizer-model"),
        (
            ["--input", path, "--output-prefix", tmp_path / "file" / "x"]
            + ["--tokenizer-type", "byte"],
            "nothing was written",
        ),
    ]:
        process = run(*arguments)
        assert process.returncode == 2
        assert message in process.stderr
        assert process.stderr.count("\n") == 1


@pytest.mark.parametrize("length", [300_000, 3_000])  # fails while writing or while flushing
def test_full_disk_exits_with_one_line_and_no_files(tmp_path, length):
    path = write_lines(tmp_path / "a.jsonl", ["x" * length])
    (tmp_path / "out").mkdir()
    limited = (
        "import os, resource, sys; "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({length}, {length})); "
        "os.execv(sys.executable, [sys.executable, '-m', *sys.argv[1:]])"
    )
    process = run(
        "--input", path, "--tokenizer-type", "byte", "--output-prefix", tmp_path / "out" / "x",
        python=["-c", limited],
    )  # fmt: skip
    assert process.returncode == 2, process.stderr
    assert "nothing was written" in process.stderr
    assert process.stderr.count("\n") == 1
    assert list((tmp_path / "out").iterdir()) == []


def test_progress_in_a_file_is_plain_lines(monkeypatch):
    monkeypatch.setattr("megatron.training.data.progress_display._SECONDS_BETWEEN_LINES", 0.0)
    out = io.StringIO()
    with show_progress(2_000_000, out) as report:
        report(read_bytes=0, documents=0, tokens=0)
        time.sleep(0.02)
        report(read_bytes=1_000_000, documents=70, tokens=5000)
    final_line = out.getvalue().splitlines()[-1]
    assert final_line.startswith("encoded 1.0 of 2.0 MB (50%), 70 documents, 5,000 tokens, ")
    assert final_line.endswith(" MB/s, 0:00:00 left")


def _read_until_closed(reader: int) -> Iterator[bytes]:
    """Read a terminal's output in chunks: a single read may return only the first frame."""
    while True:
        try:
            chunk = os.read(reader, 1 << 16)
        except OSError:  # Linux's end of file on a pseudo-terminal whose writers are closed
            return
        if not chunk:
            return
        yield chunk


def test_progress_on_a_terminal_is_a_bar():
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as terminal, show_progress(2_000_000, terminal) as report:
        report(read_bytes=1_000_000, documents=70, tokens=5000)
    output = b"".join(_read_until_closed(reader)).decode()
    os.close(reader)
    assert "encoding" in output
    assert "70 documents, 5,000 tokens" in output
