# SPDX-License-Identifier: Apache-2.0
"""Runs of TransformerEngine's layers, on a stand-in for its extension, and of local ones."""

import pytest

from megatron.training import pretrain_gpt
from tests.functional_tests.small_run import (
    flags,
    losses,
    rank_process,
    run_on,
    running,
    write_tokens,
)
from tests.support import te_extension, te_wheel

TE = "--transformer-impl transformer_engine"
LAYOUT = (
    "--tensor-model-parallel-size 2 --tensor-parallel-num-weight-shards 4 --sequence-parallel "
    "--attention-dropout 0 --hidden-dropout 0"
)

needs_te = pytest.mark.skipif(
    not te_wheel.is_there(), reason="TransformerEngine is not in build/: run make te-wheels"
)


def te_process(rank, world, port, argv):
    """Be one rank of a run, with the stand-in."""
    te_extension.install(te_wheel.tree())
    rank_process(rank, world, port, argv)


@needs_te
@pytest.mark.slow
def test_a_te_run_has_the_losses_of_a_local_one_which_goes_on_from_its_checkpoint(tmp_path):
    prefix = write_tokens(tmp_path / "data")

    def arguments(folder, more=""):
        save = f"--save {tmp_path / folder} --save-interval 3 --train-iters 6"
        return flags(prefix, f"{LAYOUT} {save} {more}")

    run_on(4, arguments("local"))
    with running(4, arguments("te", f"{TE} --exit-interval 3"), process=te_process) as ranks:
        ended = ranks.outcomes(timeout=100.0)
        log = ranks.log(3)
    assert all(outcome.exit_code == 0 for outcome in ended), log
    assert "TransformerEngine" in log
    run_on(4, arguments("te", f"--load {tmp_path / 'te'}"))
    wanted = losses(tmp_path / "local" / "metrics.jsonl")
    got = losses(tmp_path / "te" / "metrics.jsonl")
    assert sorted(got) == sorted(wanted) == list(range(1, 7))
    assert all(abs(got[i] - wanted[i]) <= 1e-6 * abs(wanted[i]) for i in wanted), (got, wanted)


def test_without_transformer_engine_the_extra_is_named(tmp_path, capsys):
    argv = flags(write_tokens(tmp_path / "data"), f"{TE} --cuda-graph-impl full_iteration")
    assert pretrain_gpt.main(argv, {}) == 2
    said = capsys.readouterr().err
    assert "megatron-lm[te]" in said
    assert "is not recorded in --cuda-graph-impl full_iteration" in said
