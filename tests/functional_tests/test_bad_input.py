# SPDX-License-Identifier: Apache-2.0
"""User errors: one line that says how to fix it, a nonzero exit code, and no data loss."""

from __future__ import annotations

import pytest

from megatron.cli import error_reports
from megatron.cli.errors import ExitCode
from megatron.training import pretrain_gpt
from tests.functional_tests.small_run import flags, refused, run_in_process, write_tokens

SHORT = "--eval-interval 0 --train-iters 2 --lr-warmup-iters 0"


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


@pytest.fixture
def saved(prefix, tmp_path, capsys):
    """Return a folder with one checkpoint, at iteration 2."""
    folder = tmp_path / "saved"
    assert run_in_process(flags(prefix, f"{SHORT} --save {folder}")) == 0
    capsys.readouterr()
    return folder


def test_checkpoint_of_other_dtype_or_data_is_refused(prefix, saved, tmp_path, capsys):
    refused(flags(prefix, f"--bf16 --load {saved}"), "bf16: False in", "--no-load-optim")
    changed_prefix = write_tokens(tmp_path / "other", seed=6)
    refused(flags(changed_prefix, f"--load {saved}"), "trained on other data", "--finetune")
    finetune = flags(changed_prefix, f"--load {saved} --finetune {SHORT} --bf16")
    assert run_in_process(finetune) == 0
    assert "; starting at iteration 0" in capsys.readouterr().out


def test_unwritable_save_folder_is_refused_before_training(prefix, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    argv = flags(prefix, f"{SHORT} --save {tmp_path / 'file' / 'save'}")
    refused(argv, "cannot save under", "name a folder that can be written")
