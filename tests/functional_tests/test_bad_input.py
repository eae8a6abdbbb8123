# SPDX-License-Identifier: Apache-2.0
"""User errors: one line that says how to fix it, a nonzero exit code, and no data loss."""

from __future__ import annotations

import json
import re
import resource
import shutil
import signal

import pytest

from megatron.cli import error_reports
from megatron.cli.errors import ExitCode
from megatron.core.dist_checkpointing import latest_checkpoint, verify_checkpoint
from megatron.training import pretrain_gpt
from tests.functional_tests.small_run import flags, run_in_process, write_tokens
from tests.functional_tests.torchrun_job import torchrun
from tests.support.ranks import start_ranks

SHORT = "--eval-interval 0 --train-iters 2 --lr-warmup-iters 0"


@pytest.fixture
def prefix(tmp_path):
    return write_tokens(tmp_path / "tokens")


def refused(capsys, argv, *texts, code=ExitCode.USER_ERROR):
    """Run and expect one line on stderr that contains `texts`."""
    code_of_run = run_in_process(argv)
    err = capsys.readouterr().err
    assert code_of_run == code, err
    assert err.startswith("pretrain_gpt: ")
    assert err.count("\n") == 1, err
    for text in texts:
        assert text in err
    return err


def test_option_error_is_printed_once_across_killed_ranks(prefix):
    argv = flags(prefix, "--overlap-param-gather")
    late = "tests.functional_tests.late_first_rank"
    output, _ = torchrun(argv, "--standalone", processes=4, module=late).communicate(timeout=100)
    assert output.count("pretrain_gpt: ") == 1, output
    assert output.count("--overlap-param-gather has no effect with ") == 1, output
    assert "ended by" not in output
    assert re.search(r"local_rank: 0 \(|rank +: 0 \(", output), output
    assert re.search(rf"exitcode +: {int(ExitCode.USER_ERROR)} ", output), output


def test_first_rank_of_each_node_reports_a_local_error(prefix, capsys, monkeypatch):
    monkeypatch.setattr(error_reports, "PATIENCE_SECONDS", 0.01)
    address = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for rank, local_rank, num_lines in ((2, 0, 1), (3, 1, 0)):
        environment = {**address, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        code = pretrain_gpt.main(flags(prefix, "--config absent.yaml"), environment)
        assert code == ExitCode.USER_ERROR
        err = capsys.readouterr().err
        assert err.count("\n") == num_lines, err
        assert ("absent.yaml" in err) == bool(num_lines)


def test_missing_vocabulary_size_is_refused(prefix, capsys):
    argv = flags(prefix, SHORT)
    index = argv.index("--vocab-size")
    refused(capsys, argv[:index] + argv[index + 2 :], "give --tokenizer-model, or --vocab-size")


def test_tokens_of_another_tokenizer_are_refused(prefix, capsys):
    description = {"tokenizer": {"fingerprint": "other", "vocab_size": 61, "eod": 0}}
    prefix.with_suffix(".json").write_text(json.dumps(description))
    argv = flags(prefix, f"{SHORT} --tokenizer-type byte --vocab-size 300")
    refused(capsys, argv, "written with another tokenizer")


@pytest.fixture
def saved(prefix, tmp_path, capsys):
    """Return a folder with one checkpoint, at iteration 2."""
    folder = tmp_path / "saved"
    assert run_in_process(flags(prefix, f"{SHORT} --save {folder}")) == 0
    capsys.readouterr()
    return folder


def test_missing_checkpoint_is_refused(prefix, saved, capsys):
    refused(capsys, flags(prefix, f"--load {saved / 'iter_0000009'}"), "no such checkpoint")


def test_damaged_checkpoints_are_refused(prefix, saved, tmp_path, capsys):
    shard = "iter_0000002/shard-00000.safetensors"
    content = (saved / shard).read_bytes()
    for name, damaged in {
        "flipped": content[:-7] + bytes([content[-7] ^ 4]) + content[-6:],
        "truncated": content[:-100],
    }.items():
        folder = tmp_path / name
        shutil.copytree(saved, folder)
        (folder / shard).write_bytes(damaged)
        argv = flags(prefix, f"--train-iters 4 --eval-interval 0 --load {folder / 'iter_0000002'}")
        refused(capsys, argv, "shard-00000.safetensors")
    refused(capsys, flags(prefix, f"--load {tmp_path / 'truncated'}"), "no undamaged checkpoint")


def test_checkpoint_of_other_dtype_or_data_is_refused(prefix, saved, tmp_path, capsys):
    refused(capsys, flags(prefix, f"--bf16 --load {saved}"), "bf16: False in", "--no-load-optim")
    changed_prefix = write_tokens(tmp_path / "other", seed=6)
    refused(capsys, flags(changed_prefix, f"--load {saved}"), "trained on other data", "--finetune")
    finetune = flags(changed_prefix, f"--load {saved} --finetune {SHORT} --bf16")
    assert run_in_process(finetune) == 0
    assert "; starting at iteration 0" in capsys.readouterr().out


def test_unwritable_save_folder_is_refused_before_training(prefix, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    argv = flags(prefix, f"{SHORT} --save {tmp_path / 'file' / 'save'}")
    refused(capsys, argv, "cannot save under", "name a folder that can be written")


def _limited(rank: int, world: int, argv: list[str], bytes_left: int) -> int:
    """Run with a file size limit, like on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, bytes_left))
    return pretrain_gpt.main(argv, {})


def test_a_full_disk_stops_the_run_and_keeps_earlier_checkpoints(prefix, saved):
    shard = saved / "iter_0000002" / "shard-00000.safetensors"
    argv = flags(prefix, f"--train-iters 3 --eval-interval 0 --save {saved} --load {saved}")
    with start_ranks(_limited, 1, argv, shard.stat().st_size // 2, init=False) as ranks:
        outcomes = ranks.outcomes(timeout=60)
        text = ranks.log(0)
    assert outcomes[0].value == ExitCode.SAVE_FAILED, text
    assert "saving failed: " in text
    assert "Traceback" not in text
    assert latest_checkpoint(saved) == saved / "iter_0000002"
    verify_checkpoint(saved / "iter_0000002")
    assert [p.name for p in saved.glob("iter_*")] == ["iter_0000002"], "a partial folder is left"
