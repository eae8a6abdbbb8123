# SPDX-License-Identifier: Apache-2.0
"""Preprocessing by several workers, into several streams, interrupted and resumed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron.cli.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from megatron.core.datasets import IndexedDataset
from megatron.training import preprocess_data
from megatron.training.data.chat import read_chat_template
from megatron.training.data.journaled_output import Journal
from megatron.training.inspect_data import _main as inspect
from megatron.training.preprocess_data import PreprocessConfig, preprocess
from megatron.training.train_tokenizer import _main as train_tokenizer
from tests.support.conversations import encode_conversation

TEXTS = [f"{number} " + "wörd and word " * (number * 7 % 40) for number in range(300)]


@pytest.fixture
def corpus(tmp_path):
    """Return the path of a JSON lines file in which every 50th line is invalid."""
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": text, "title": text[:5]}) for text in TEXTS]
    for index in range(0, 300, 50):
        lines[index] = "oops"
    path.write_text("\n".join(lines))
    return str(path)


def config_for(tmp_path, *inputs, **options):
    options = {"tokenizer_type": "byte", "workers": 1, "append_eod": True, **options}
    return PreprocessConfig(input=inputs, output_prefix=str(tmp_path / "out" / "data"), **options)


def files(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_files_do_not_depend_on_the_number_of_workers(tmp_path, corpus):
    train_tokenizer(
        ["--input", corpus, "--vocab-size", "300", "--output", str(tmp_path / "tokenizer.json")]
    )
    config = config_for(
        tmp_path, corpus, tokenizer_type="hf", tokenizer_model=str(tmp_path / "tokenizer.json")
    )
    files_by_workers = []
    for workers in (1, 2):
        config = replace(config, output_prefix=str(tmp_path / f"by{workers}" / "x"))
        config = replace(config, workers=workers)
        preprocess(config, block_bytes=3000)
        files_by_workers.append(files(tmp_path / f"by{workers}"))
    assert files_by_workers[0] == files_by_workers[1]
    assert json.loads(files_by_workers[0]["x.json"])["rejected"] == {"not JSON": 6}
    assert json.loads(files_by_workers[0]["x.json"])["examples"] == {"not JSON": f"{corpus}:1"}
    tokenizer = HuggingFaceTokenizer(tmp_path)
    dataset = IndexedDataset(config.output_prefix)
    assert [*tokenizer.tokenize(TEXTS[299]), tokenizer.eod] == dataset.get(293).tolist()


def test_worker_error_is_raised_in_the_parent(tmp_path, corpus):
    with pytest.raises(ValueError, match=rf"{corpus}:1: not JSON; fix it"):
        preprocess(config_for(tmp_path, corpus, workers=2, strict=True), block_bytes=3000)
    assert list((tmp_path / "out").iterdir()) == []


def test_worker_death_is_reported_and_committed_data_stays(tmp_path, corpus):
    config = config_for(tmp_path, corpus, workers=2)

    def kill(*, documents: int, **counts: int) -> None:
        for child in [] if documents < 100 else children(os.getpid()):
            if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text():
                os.kill(child, signal.SIGKILL)

    with pytest.raises(ValueError, match=r"an encoding process died \(exit code -9\)"):
        preprocess(config, block_bytes=1000, commit_bytes=1000, report=kill)
    document_counts: list[int] = []
    preprocess(
        replace(config, resume=True),
        report=lambda *, documents, **_: document_counts.append(documents),
    )
    assert document_counts[0] >= 100
    assert IndexedDataset(config.output_prefix).num_documents == 294


def test_damaged_journal_is_a_one_line_error(tmp_path, corpus):
    config = config_for(tmp_path, corpus)

    def stop(*, documents: int, **counts: int) -> None:
        if documents >= 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preprocess(config, block_bytes=1000, commit_bytes=1000, report=stop)
    path = tmp_path / "out" / "data.journal"
    lines = path.read_text().splitlines()
    for changed in (
        {"position": 7},
        {"position": {"file": 0, "offset": -1, "record": 1}},
        {"written": []},
        {"tally": {}},
        {"complete": 7},
    ):
        latest = json.dumps({**json.loads(lines[-1]), **changed})
        path.write_text("\n".join([*lines, latest]) + "\n")
        with pytest.raises(ValueError, match=r"data\.journal is damaged"):
            preprocess(replace(config, resume=True))
    path.write_text("\n".join(lines) + "\n")
    os.truncate(path, 200 << 30)  # one endless line
    preprocess(replace(config, resume=True))
    assert IndexedDataset(config.output_prefix).num_documents == 294


def children(process: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        pids = Path(f"/proc/{process}/task/{process}/children").read_text()
        return [int(pid) for pid in pids.split()]
    return []


def test_workers_exit_with_killed_run_and_next_run_resumes(tmp_path, corpus):
    preprocess(config_for(tmp_path, corpus))
    script = (
        "import sys, time; from megatron.training.preprocess_data import PreprocessConfig as C, "
        "preprocess\n"
        "if __name__ == '__main__':\n"
        "    config = C(input=(sys.argv[1],), output_prefix=sys.argv[2], tokenizer_type='byte', "
        "append_eod=True, workers=2)\n"
        "    preprocess(config, block_bytes=1000, commit_bytes=3000, "
        "report=lambda **_: time.sleep(0.05))\n"
    )
    (tmp_path / "work.py").write_text(script)
    prefix = tmp_path / "killed" / "data"
    run = subprocess.Popen([sys.executable, tmp_path / "work.py", corpus, prefix])
    deadline = time.monotonic() + 30
    journal = Path(f"{prefix}.journal")
    while not journal.exists() or journal.read_bytes().count(b"\n") < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    workers = children(run.pid)
    assert len(workers) >= 2, "no workers"
    run.kill()
    run.wait()
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_running, workers))
    document_counts: list[int] = []
    config = replace(config_for(tmp_path, corpus), output_prefix=str(prefix), workers=2)
    preprocess(
        replace(config, resume=True),
        block_bytes=2000,
        report=lambda *, documents, **counts: document_counts.append(documents),
    )
    assert document_counts[0] > 20
    assert files(tmp_path / "killed") == files(tmp_path / "out")


def is_running(process: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z"
    return False


def test_each_json_key_becomes_a_data_set(tmp_path, corpus):
    summaries = preprocess(config_for(tmp_path, corpus, json_keys=("title", "text")))
    prefix = str(tmp_path / "out" / "data")
    assert list(summaries) == [f"{prefix}_title", f"{prefix}_text"]
    for key, expected in [("title", TEXTS[7][:5]), ("text", TEXTS[7])]:
        dataset = IndexedDataset(f"{prefix}_{key}")
        assert bytes(dataset.get(6)[:-1].astype(np.uint8)).decode() == expected
        assert json.loads(Path(f"{prefix}_{key}.json").read_text())["documents"] == 294
    (tmp_path / "b.txt").write_text("x")
    with pytest.raises(ValueError, match=r"b\.txt is plain text, without keys"):
        preprocess(config_for(tmp_path, str(tmp_path / "b.txt"), json_keys=("title", "text")))


CHATS = [
    [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "é" * (n + 1)}]
    for n in range(9)
]


def test_conversations_are_written_with_a_loss_mask(tmp_path, capsys):
    records = [*CHATS[:4], [], "none", [{"role": "user", "content": "alone"}], *CHATS[4:]]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"talk": chat}) + "\n" for chat in records))
    config = config_for(
        tmp_path, str(path), chat=True, chat_template="plain", chat_key="talk", append_eod=False
    )
    (summary,) = preprocess(config).values()
    dataset, mask = (
        IndexedDataset(config.output_prefix),
        IndexedDataset(f"{config.output_prefix}.mask"),
    )
    template = read_chat_template("plain")
    assert mask.dtype == np.uint8
    assert len(dataset) == len(mask) == len(CHATS)
    for number, chat in enumerate(CHATS):
        ids, learnt = encode_conversation(chat, ByteTokenizer(), template)
        assert dataset.get(number).tolist() == ids
        assert mask.get(number).tolist() == learnt
    assert (summary.kind, summary.documents) == ("chat", 9)
    assert summary.rejected == {"no list of messages": 2, "no assistant message": 1}
    assert summary.examples == {
        "no list of messages": f"{path}:5", "no assistant message": f"{path}:7",
    }  # fmt: skip
    assert sorted(files(tmp_path / "out")) == [
        "data.bin", "data.idx", "data.json", "data.mask.bin", "data.mask.idx",
    ]  # fmt: skip
    inspect([config.output_prefix, "--document", "1"])
    learnt_tokens = int(mask.tokens.sum())
    assert f"learnt from: {learnt_tokens} tokens" in capsys.readouterr().out


def test_chat_template_error_is_reported(tmp_path):
    (tmp_path / "chats.jsonl").write_text(
        "".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS[:3])
    )
    source = (
        "{% for m in messages %}{{ m.content }}\n{{ 1 / (m.content | length - 1) }}{% endfor %}"
    )
    (tmp_path / "template").write_text(source)
    config = config_for(
        tmp_path,
        str(tmp_path / "chats.jsonl"),
        chat=True,
        chat_template=str(tmp_path / "template"),
        append_eod=False,
    )
    (summary,) = preprocess(config).values()
    assert summary.rejected == {"the template refuses it": 1}
    (example,) = summary.examples.values()
    assert f"{tmp_path / 'chats.jsonl'}:1: division by zero (line 2)" in example


def test_contradicting_chat_options_are_refused():
    common = {"input": ("a",), "output_prefix": "b", "tokenizer_type": "byte"}
    with pytest.raises(ValueError, match="--append-eod is useless with --chat"):
        PreprocessConfig(**common, chat=True, append_eod=True)
    with pytest.raises(ValueError, match="--chat-template has no effect without --chat"):
        PreprocessConfig(**common, chat_template="plain")


def test_lines_with_invalid_ids_are_rejected(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "1 2"}\n{"text": "1 9"}\n{"text": "x"}\n')
    config = config_for(tmp_path, str(tmp_path), tokenizer_type="null", vocab_size=5)
    (summary,) = preprocess(config).values()
    assert IndexedDataset(config.output_prefix).tokens.tolist() == [1, 2, 5]
    assert summary.documents == 1
    assert summary.examples == {"refused by the tokenizer": f"{tmp_path}/a.jsonl:2"}
    assert summary.rejected == {"refused by the tokenizer": 2}


def test_run_resumes_after_a_full_disk(tmp_path, corpus):
    expected = preprocess(config_for(tmp_path, corpus, append_eod=True))
    expected_files = files(tmp_path / "out")
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))\n"
        "from megatron.training import preprocess_data as p\n"
        "from megatron.cli.errors import run_entry_point\n"
        "work = p.preprocess\n"
        "p.preprocess = lambda *a, **k: work(*a, **k, commit_bytes=5000, block_bytes=1000)\n"
        "sys.exit(run_entry_point(lambda: p._main(sys.argv[1:]), prog='p'))"
    )
    arguments = ["--input", corpus, "--tokenizer-type", "byte", "--append-eod"]
    prefix = tmp_path / "full" / "data"
    process = subprocess.run(
        [sys.executable, "-c", limited, *arguments, "--output-prefix", str(prefix)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert process.returncode == 2, process.stderr
    assert "continue with --resume" in process.stderr
    assert process.stderr.count("\n") == 1
    document_counts = []
    config = replace(config_for(tmp_path, corpus), output_prefix=str(prefix), resume=True)
    summaries = preprocess(
        config, report=lambda *, documents, **counts: document_counts.append(documents)
    )
    assert document_counts[0] > 100
    assert list(summaries.values()) == list(expected.values())
    assert files(tmp_path / "full") == expected_files


def test_ctrl_c_message_names_the_resume_flag(tmp_path, corpus, capsys, monkeypatch):
    def interrupted(config: PreprocessConfig, **counts: object) -> None:
        def stop(**progress: int) -> None:
            raise KeyboardInterrupt

        preprocess(config, commit_bytes=1, report=stop)

    monkeypatch.setattr(preprocess_data, "preprocess", interrupted)
    arguments = ["--input", corpus, "--tokenizer-type", "byte"]
    arguments += ["--output-prefix", str(tmp_path / "out" / "data")]
    with pytest.raises(KeyboardInterrupt):
        preprocess_data._main(arguments)
    assert capsys.readouterr().err == "finished work is kept: continue with --resume\n"
    monkeypatch.undo()
    preprocess_data._main([*arguments, "--resume"])
    out = capsys.readouterr().out
    assert "294 documents" in out
    assert "rejected 6 lines: 6 not JSON (first: " in out


def test_resume_without_a_journal_starts_from_scratch(tmp_path, corpus):
    (summary,) = preprocess(config_for(tmp_path, corpus, resume=True)).values()
    assert summary.documents == 294


def test_concurrent_run_on_one_data_set_is_refused(tmp_path, corpus):
    (tmp_path / "out").mkdir()
    journal = Journal(tmp_path / "out" / "data.journal")
    with pytest.raises(ValueError, match=r"data\.journal is in use: another run"):
        preprocess(config_for(tmp_path, corpus))
    journal.remove()
    preprocess(config_for(tmp_path, corpus))


def test_truncated_journal_line_is_ignored(tmp_path):
    path = tmp_path / "x.journal"
    journal = Journal(path)
    assert (journal.header, journal.latest) == (None, None)
    journal.begin({"of": "what"})
    for number in range(3):
        journal.append({"at": number})
    journal.close()
    content = path.read_bytes()
    line_length = len(b'{"at": 2}\n')
    for num_missing in range(1, line_length + 1):
        path.write_bytes(content[:-num_missing])
        journal = Journal(path)
        assert (journal.header, journal.latest) == ({"of": "what"}, {"at": 1})
        journal.append({"at": 7})
        journal.close()
        assert path.read_bytes() == content[:-line_length] + b'{"at": 7}\n'
    path.write_bytes(b"\x00" * 40 + b"\n")
    journal = Journal(path)
    assert (journal.header, journal.latest) == (None, None)
    journal.remove()
    assert not path.exists()


def test_single_block_starts_no_workers(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr("megatron.training.data.encoder._start_workers", None)
    preprocess(config_for(tmp_path, corpus, workers=8))


def test_inspect_shows_counts_and_a_document(tmp_path, corpus, capsys):
    config = config_for(tmp_path, corpus)
    preprocess(config)
    inspect([config.output_prefix, "--document", "2", "--max-tokens", "3"])
    out = capsys.readouterr().out
    tokens = sum(len(t.encode()) + 1 for n, t in enumerate(TEXTS) if n % 50)
    assert f"data: 294 documents, {tokens:,} tokens of uint16" in out
    assert "largest id 256" in out
    assert "written with: byte (vocabulary 257, end of document 256)" in out
    assert 'the first 3 of them:\n    51 32 119\n    "3 w"\n' in out
    with pytest.raises(ValueError, match="has the documents 0 to 293"):
        inspect(["--data-path", config.output_prefix, "--document", "294"])


def test_tokenizer_training_stops_at_train_bytes(tmp_path, corpus, capsys):
    output = tmp_path / "new" / "tokenizer.json"
    arguments = ["--input", corpus, "--output", str(output), "--vocab-size", "280"]
    train_tokenizer([*arguments, "--train-bytes", "2000"])
    output_text = capsys.readouterr().out
    assert f"wrote {output}: 267 ids from 10 documents" in output_text
    (tmp_path / "empty.jsonl").write_text("oops\n")
    saved = output.read_bytes()
    with pytest.raises(ValueError, match="--overwrite"):
        train_tokenizer(arguments)
    assert output.read_bytes() == saved
    train_tokenizer([*arguments, "--overwrite"])
    assert output.read_bytes() != saved
    with pytest.raises(ValueError, match=r"no document in .*1 not JSON"):
        train_tokenizer(["--input", str(tmp_path / "empty.jsonl"), *arguments[2:], "--overwrite"])


def test_tokenizer_training_shows_its_progress(tmp_path, corpus, capsys, monkeypatch):
    monkeypatch.setattr("megatron.training.data.progress_display._SECONDS_BETWEEN_LINES", 0.0)
    train_tokenizer(
        ["--input", corpus, "--output", str(tmp_path / "tokenizer.json"), "--vocab-size", "280"]
    )
    lines = capsys.readouterr().out.splitlines()
    shares = [int(x.partition("(")[2].partition("%")[0]) for x in lines if x.startswith("read ")]
    assert len(shares) == 294
    assert shares == sorted(shares)
    assert shares[-1] > 60  # the rest is JSON around the texts


def test_finished_data_set_is_overwritten_only_by_option(tmp_path, corpus):
    config = config_for(tmp_path, corpus)
    expected = preprocess(config)
    saved = files(tmp_path / "out")
    changed = replace(config, append_eod=False)
    with pytest.raises(ValueError, match=r"data\.idx.*--overwrite"):
        preprocess(changed)
    with pytest.raises(ValueError, match="--overwrite"):
        preprocess(replace(changed, resume=True))
    assert files(tmp_path / "out") == saved

    def never(**counts):
        raise AssertionError("encoded again")

    # A job that restarts with --resume accepts the finished data set; workers may differ.
    assert preprocess(replace(config, resume=True, workers=2), report=never) == expected
    assert files(tmp_path / "out") == saved
    preprocess(replace(changed, overwrite=True))
    assert len(files(tmp_path / "out")["data.bin"]) == len(saved["data.bin"]) - 2 * 294
    Path(f"{config.output_prefix}.idx").unlink()  # an incomplete data set is protected as well
    with pytest.raises(ValueError, match=r"data\.bin.*--overwrite"):
        preprocess(config)


def test_overwriting_removes_the_old_loss_mask(tmp_path, corpus):
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chats.write_text(json.dumps({"messages": turns}) + "\n")
    options = {"chat": True, "chat_template": "plain", "append_eod": False}
    preprocess(config_for(tmp_path, str(chats), **options))
    assert "data.mask.idx" in files(tmp_path / "out")
    preprocess(config_for(tmp_path, corpus, overwrite=True))
    assert set(files(tmp_path / "out")) == {"data.bin", "data.idx", "data.json"}


def test_shuffle_seed_orders_all_streams_alike(tmp_path, corpus):
    def pairs():
        datasets = [IndexedDataset(tmp_path / "out" / f"data_{key}") for key in ("title", "text")]
        return [tuple(dataset.get(n).tobytes() for dataset in datasets) for n in range(294)]

    options = {"json_keys": ("title", "text"), "append_eod": False}
    preprocess(config_for(tmp_path, corpus, **options))
    before = pairs()
    shuffled = config_for(tmp_path, corpus, **options, shuffle_seed=3, overwrite=True)
    preprocess(shuffled)
    after = pairs()
    assert after != before
    assert sorted(after) == sorted(before)
    # The last tenth, which --split uses for validation, comes from the whole corpus.
    positions = [before.index(pair) for pair in after[-29:]]
    assert min(positions) < 100 < 200 < max(positions)
    shuffled_files = files(tmp_path / "out")

    def kill(**counts):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preprocess(shuffled, block_bytes=1000, commit_bytes=1000, report=kill)
    preprocess(replace(shuffled, resume=True, overwrite=False, workers=2))
    assert files(tmp_path / "out") == shuffled_files
    assert not [name for name in shuffled_files if "tmp" in name or "journal" in name]


def test_missing_eod_between_documents_is_a_warning(tmp_path, corpus, capsys):
    def lines(*flags):
        prefix = ["--output-prefix", str(tmp_path / "x"), "--overwrite"]
        preprocess_data._main(["--input", corpus, "--tokenizer-type", "byte", *prefix, *flags])
        return [x for x in capsys.readouterr().out.splitlines() if "--append-eod" in x]

    assert len(lines()) == 1
    assert lines("--append-eod") == []
