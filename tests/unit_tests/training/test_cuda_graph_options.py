# SPDX-License-Identifier: Apache-2.0
"""Options of CUDA graphs: what cannot be recorded is named at once, and the rest reaches a run."""

from __future__ import annotations

from unittest import mock

import pytest

from megatron.training import session
from megatron.training.config.check import check
from megatron.training.core_configs import data_parallel_config, early_gather
from tests.functional_tests.small_run import flags, losses, run_here, write_tokens
from tests.support.device_products import products_of_a_gpu
from tests.support.inputs import one_thread
from tests.support.op_tape import OpTape, TapeRecorder
from tests.unit_tests.training.small_config import small_config

GRAPH = "--cuda-graph-impl full_iteration"
CUT = "--data-parallel-sharding-strategy optim_grads_params"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (f"{GRAPH} --device cpu", "full_iteration needs a GPU: drop it or --device cpu"),
        (f"{GRAPH} {CUT} --check-weight-gather", "--check-weight-gather compares the order of"),
        (f"{GRAPH} --check-collectives", "--check-collectives does not see the collectives"),
        (f"{GRAPH} --log-straggler", "--log-straggler does not see how long"),
        (f"{GRAPH} --cuda-graph-warmup-steps 10", "10 is not below --train-iters 10, so that"),
        ("--cuda-graph-warmup-steps 4", "has no effect without --cuda-graph-impl full_iteration"),
    ],
)
def test_each_problem_is_reported_by_itself(more, message):
    problems = check(small_config(more), 2)
    assert len(problems) == 1, problems
    assert message in problems[0]


def test_all_problems_come_at_once():
    more = f"{GRAPH} {CUT} --device cpu --check-weight-gather --check-collectives --log-straggler"
    assert len(check(small_config(f"{more} --cuda-graph-warmup-steps 11"), 2)) == 5
    assert check(small_config(f"{GRAPH} {CUT} --overlap-param-gather"), 2) == []


def test_a_warm_up_of_no_steps_is_refused():
    with pytest.raises(ValueError, match="--cuda-graph-warmup-steps is 0: it must be above 0"):
        small_config(f"{GRAPH} --cuda-graph-warmup-steps 0")


@pytest.mark.parametrize(
    ("more", "early", "says"),
    [
        ("--overlap-param-gather", True, False),
        (f"--overlap-param-gather {GRAPH}", False, True),
        (f"--overlap-param-gather {GRAPH} --no-fsdp-all-gather-in-start-param-sync", False, False),
        ("--overlap-param-gather --no-fsdp-all-gather-in-start-param-sync", False, False),
        (GRAPH, False, False),
    ],
)
def test_cuda_graph_disables_early_gather_with_one_warning(more, early, says):
    config = small_config(f"{CUT} {more}")
    found, reason = early_gather(config)
    assert (found, reason is not None) == (early, says)
    assert data_parallel_config(config).fsdp_all_gather_in_start_param_sync is early
    if says:
        assert "--no-fsdp-all-gather-in-start-param-sync is set, as --cuda-graph-impl" in reason


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture
def prefix(tmp_path):
    with one_thread():
        yield write_tokens(tmp_path / "tokens")


def run_recorded(argv: list[str]) -> tuple[int, list[TapeRecorder]]:
    """Run with a stand-in for the GPU's recorder; return the exit code and what recorded."""
    made: list[TapeRecorder] = []

    def recorder(device: object, option: str) -> TapeRecorder:
        made.append(TapeRecorder(OpTape()))
        return made[-1]

    with mock.patch.object(session, "CudaRecorder", recorder):
        return run_here(argv), made


def test_without_a_gpu_a_run_ends_in_one_line(prefix, capsys):
    assert run_here(flags(prefix, GRAPH)) == 2
    assert "--cuda-graph-impl full_iteration needs a GPU, and this run" in capsys.readouterr().err


def test_graph_run_matches_eager_and_resumes_from_checkpoint(prefix, tmp_path, capsys):
    short = "--eval-interval 3 --train-iters 8 --bf16"
    assert run_here(flags(prefix, f"{short} --save {tmp_path / 'plain'}")) == 0
    capsys.readouterr()
    ahead = f"{CUT} --overlap-param-gather"
    save = f"--save {tmp_path / 'saved'} --load {tmp_path / 'saved'} --save-interval 2"
    for more, replays in (("--exit-interval 6", 3), ("--cuda-graph-warmup-steps 1", 1)):
        code, made = run_recorded(flags(prefix, f"{short} {save} {GRAPH} {ahead} {more}"))
        assert code == 0
        assert [recorder.tape.replays for recorder in made] == [replays]
    said = capsys.readouterr()
    assert "of 4 microbatches in one CUDA graph after 3 eager steps" in said.err
    assert said.out.count("--no-fsdp-all-gather-in-start-param-sync is set, as") == 2
    for kind in ("train", "validation"):
        found = losses(tmp_path / "saved" / "metrics.jsonl", kind)
        assert found == losses(tmp_path / "plain" / "metrics.jsonl", kind)
        assert len(found) > 1


@pytest.mark.slow
def test_a_recorded_run_with_experts_is_the_plain_one(prefix, tmp_path):
    experts = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.1 --disable-bias-linear"
    short = f"{experts} --train-iters 5 --eval-interval 0 --cuda-graph-warmup-steps 1"
    with products_of_a_gpu():
        for name, graph in (("plain", ""), ("graph", GRAPH)):
            given = short if graph else short.rsplit(" --cuda", 1)[0]
            words = f"{given} {graph} --metrics-file {tmp_path / name}"
            code, made = run_recorded(flags(prefix, words))
            assert code == 0
    assert [recorder.tape.replays for recorder in made] == [4]
    assert losses(tmp_path / "plain") == losses(tmp_path / "graph")


def test_a_step_without_a_finite_loss_is_replayed_once_more(prefix, tmp_path):
    worse = "--lr 1e38 --lr-warmup-iters 0 --lr-decay-style constant --clip-grad 0 --train-iters 4"
    argv = flags(prefix, f"{worse} --eval-interval 0 --metrics-file {tmp_path / 'm'}")
    code, made = run_recorded([*argv, *f"{GRAPH} --cuda-graph-warmup-steps 1".split()])
    assert code == 0
    # Steps 2, 3 and 4 are not finite, and are computed twice each.
    assert made[0].tape.replays == 6
