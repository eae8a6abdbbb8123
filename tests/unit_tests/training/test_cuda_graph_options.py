# SPDX-License-Identifier: Apache-2.0
"""CUDA graph options: conflicts are reported before the run, valid options reach the run."""

from __future__ import annotations

from unittest import mock

import pytest

from megatron.training import session
from megatron.training.core_configs import data_parallel_config, early_gather
from tests.functional_tests.small_run import flags, losses, run_in_process, write_tokens
from tests.support.device_products import products_of_a_gpu
from tests.support.inputs import one_thread
from tests.support.op_tape import OpTape, TapeRecorder
from tests.unit_tests.training.small_config import small_config

GRAPH = "--cuda-graph-impl full_iteration"
CUT = "--data-parallel-sharding-strategy optim_grads_params"


@pytest.mark.parametrize(
    ("more_flags", "expected", "has_reason"),
    [
        ("--overlap-param-gather", True, False),
        (f"--overlap-param-gather {GRAPH}", False, True),
        (f"--overlap-param-gather {GRAPH} --no-fsdp-all-gather-in-start-param-sync", False, False),
        ("--overlap-param-gather --no-fsdp-all-gather-in-start-param-sync", False, False),
        (GRAPH, False, False),
    ],
)
def test_cuda_graph_disables_early_gather_with_one_warning(more_flags, expected, has_reason):
    config = small_config(f"{CUT} {more_flags}")
    early, reason = early_gather(config)
    assert (early, reason is not None) == (expected, has_reason)
    assert data_parallel_config(config).fsdp_all_gather_in_start_param_sync is expected
    if has_reason:
        assert "--no-fsdp-all-gather-in-start-param-sync is set, as --cuda-graph-impl" in reason


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture
def prefix(tmp_path):
    with one_thread():
        yield write_tokens(tmp_path / "tokens")


def run_recorded(argv: list[str]) -> tuple[int, list[TapeRecorder]]:
    """Run with tape recorders in place of CUDA's; return the exit code and the recorders."""
    recorders: list[TapeRecorder] = []

    def recorder(device: object, option: str) -> TapeRecorder:
        recorders.append(TapeRecorder(OpTape()))
        return recorders[-1]

    with mock.patch.object(session, "CudaRecorder", recorder):
        return run_in_process(argv), recorders


def test_graph_run_without_gpu_exits_with_one_line(prefix, capsys):
    assert run_in_process(flags(prefix, GRAPH)) == 2
    assert "--cuda-graph-impl full_iteration needs a GPU, but this run" in capsys.readouterr().err


def test_graph_run_matches_eager_and_resumes_from_checkpoint(prefix, tmp_path, capsys):
    short = "--eval-interval 3 --train-iters 8 --bf16"
    assert run_in_process(flags(prefix, f"{short} --save {tmp_path / 'plain'}")) == 0
    capsys.readouterr()
    overlap = f"{CUT} --overlap-param-gather"
    save = f"--save {tmp_path / 'saved'} --load {tmp_path / 'saved'} --save-interval 2"
    for extra, replays in (("--exit-interval 6", 3), ("--cuda-graph-warmup-steps 1", 1)):
        code, recorders = run_recorded(flags(prefix, f"{short} {save} {GRAPH} {overlap} {extra}"))
        assert code == 0
        assert [recorder.tape.replays for recorder in recorders] == [replays]
    captured = capsys.readouterr()
    assert "of 4 microbatches in one CUDA graph after 3 eager steps" in captured.err
    assert captured.out.count("--no-fsdp-all-gather-in-start-param-sync is set, as") == 2
    for kind in ("train", "validation"):
        graph_losses = losses(tmp_path / "saved" / "metrics.jsonl", kind)
        assert graph_losses == losses(tmp_path / "plain" / "metrics.jsonl", kind)
        assert len(graph_losses) > 1


@pytest.mark.slow
def test_recorded_expert_run_matches_eager_run(prefix, tmp_path):
    experts = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.1 --disable-bias-linear"
    short = f"{experts} --train-iters 5 --eval-interval 0 --cuda-graph-warmup-steps 1"
    with products_of_a_gpu():
        for name, graph in (("plain", ""), ("graph", GRAPH)):
            run_flags = short if graph else short.rsplit(" --cuda", 1)[0]
            words = f"{run_flags} {graph} --metrics-file {tmp_path / name}"
            code, recorders = run_recorded(flags(prefix, words))
            assert code == 0
    assert [recorder.tape.replays for recorder in recorders] == [4]
    assert losses(tmp_path / "plain") == losses(tmp_path / "graph")


def test_step_with_non_finite_loss_is_replayed_again(prefix, tmp_path):
    diverging = (
        "--lr 1e38 --lr-warmup-iters 0 --lr-decay-style constant --clip-grad 0 --train-iters 4"
    )
    argv = flags(prefix, f"{diverging} --eval-interval 0 --metrics-file {tmp_path / 'm'}")
    code, recorders = run_recorded([*argv, *f"{GRAPH} --cuda-graph-warmup-steps 1".split()])
    assert code == 0
    # Steps 2, 3 and 4 are not finite, and are computed twice each.
    assert recorders[0].tape.replays == 6
