# SPDX-License-Identifier: Apache-2.0
"""Runs with TransformerEngine's layers, on a fake of its extension, and with local layers."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

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
    """Run one rank with the fake extension."""
    te_extension.install(te_wheel.tree())
    rank_process(rank, world, port, argv)


@needs_te
@pytest.mark.slow
def test_te_run_matches_local_losses_and_local_run_resumes_it(tmp_path):
    prefix = write_tokens(tmp_path / "data")

    def arguments(folder, options=""):
        save = f"--save {tmp_path / folder} --save-interval 3 --train-iters 6"
        return flags(prefix, f"{LAYOUT} {save} {options}")

    run_on(4, arguments("local"))
    with running(4, arguments("te", f"{TE} --exit-interval 3"), process=te_process) as ranks:
        ended = ranks.outcomes(timeout=100.0)
        log = ranks.log(3)
    assert all(outcome.exit_code == 0 for outcome in ended), log
    assert "TransformerEngine" in log
    run_on(4, arguments("te", f"--load {tmp_path / 'te'}"))
    expected = losses(tmp_path / "local" / "metrics.jsonl")
    actual = losses(tmp_path / "te" / "metrics.jsonl")
    assert sorted(actual) == sorted(expected) == list(range(1, 7))
    assert all(abs(actual[i] - expected[i]) <= 1e-6 * abs(expected[i]) for i in expected), (
        actual,
        expected,
    )


FP8 = (
    f"{TE} --fp8-format hybrid --fp8-amax-history-len 3 --fp8-amax-compute-algo max "
    "--hidden-size 64 --ffn-hidden-size 64 --kv-channels 16 --micro-batch-size 4 "
    "--attention-dropout 0 --hidden-dropout 0"
)


def _fp8_run(prefix, arguments, world, *, exit_code=0, process=te_process):
    argv = flags(prefix, f"{FP8} {arguments}")
    with running(world, argv, process=process) as ranks:
        ended = ranks.outcomes(timeout=100.0)
        log = ranks.log(0) + ranks.log(world - 1)
    assert all(outcome.exit_code == exit_code for outcome in ended), log
    return log


def _states(folder):
    """Return the FP8 scales and amax histories in a checkpoint."""
    states = {}
    for file in sorted(folder.glob("*.safetensors")):
        states |= {n: t for n, t in load_file(file).items() if ".fp8_" in n}
    return states


@needs_te
@pytest.mark.slow
def test_delayed_scaling_resumes_exactly(tmp_path):
    prefix = write_tokens(tmp_path / "data")
    tp = "--tensor-model-parallel-size 2 --sequence-parallel"

    def save(folder):
        return f"--save {tmp_path / folder} --save-interval 3 --train-iters 6"

    _fp8_run(prefix, f"{tp} {save('whole')}", 2)
    log = _fp8_run(prefix, f"{tp} {save('parts')} --exit-interval 3", 2)
    assert "FP8 (delayed)" in log
    shutil.copytree(tmp_path / "parts", tmp_path / "single")
    changed_history = f"--fp8-amax-history-len 5 --load {tmp_path / 'parts'}"
    assert "--fp8-amax-history-len 3" in _fp8_run(prefix, f"{tp} {changed_history}", 2, exit_code=2)
    _fp8_run(prefix, f"{tp} {save('parts')} --load {tmp_path / 'parts'}", 2)
    _fp8_run(prefix, f"{save('single')} --load {tmp_path / 'single'}", 1)
    expected, actual, single = (
        losses(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts", "single")
    )
    assert expected == actual
    # Sums in another order round to other FP8 values.
    assert all(abs(single[i] - expected[i]) <= 1e-3 * expected[i] for i in expected), (
        single,
        expected,
    )
    scales = {
        name: _states(tmp_path / name / "iter_0000006") for name in ("whole", "parts", "single")
    }
    assert len(scales["whole"]) == 2 * 4 * 2  # two states of four products in two layers
    assert scales["whole"].keys() == scales["single"].keys()
    for name, state in scales["whole"].items():
        assert torch.equal(state, scales["parts"][name])
        is_positive = bool((state > 0.0).all())
        assert is_positive, name
        assert torch.allclose(state, scales["single"][name], rtol=0.1), name


def test_missing_transformer_engine_error_names_the_extra(tmp_path, capsys):
    argv = flags(write_tokens(tmp_path / "data"), f"{TE} --cuda-graph-impl full_iteration")
    assert pretrain_gpt.main(argv, {}) == 2
    err = capsys.readouterr().err
    assert "megatron-lm[te]" in err
    # One line about CUDA graphs with TransformerEngine.
    assert sum(f"{TE} cannot be captured by --cuda-graph-impl" in s for s in err.splitlines()) == 1
    assert err.count("--cuda-graph-impl full_iteration") == 1
