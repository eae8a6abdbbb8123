# SPDX-License-Identifier: Apache-2.0
"""The matmul dtype of a bf16 run on a CPU: equal on all ranks, logged, and kept on resume."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.core.dist_checkpointing import Solo, read_extra
from megatron.core.ops import backend_choice
from megatron.training.core_configs import CpuMatmul
from tests.functional_tests.small_run import flags, run_in_process, timeless, write_tokens

FLAG = "--cpu-matmul-dtype"
CPU = torch.device("cpu")


class SecondRank(Solo):
    """Rank 1 of two ranks, where rank 0 measured `answer`."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        self.rank, self._answer = 1, answer

    def _exchange(self, stage, message, decide):
        return decide([{"value": self._answer}, message])


@pytest.mark.parametrize(
    ("prefers_bf16", "dtype"), [(True, torch.bfloat16), (False, torch.float32)]
)
def test_all_ranks_use_the_dtype_measured_by_rank_0(prefers_bf16, dtype, monkeypatch):
    def measured() -> float:
        raise AssertionError("the second rank measures too")

    monkeypatch.setattr(backend_choice, "cpu_bf16_speedup", measured)
    rank = SecondRank([prefers_bf16, 2.0])
    chosen = CpuMatmul.choose("auto", weights=torch.bfloat16, device=CPU, coordinator=rank)
    assert chosen is not None
    assert (chosen.dtype, chosen.speedup) == (dtype, 2.0)


def test_fp32_or_gpu_runs_have_no_cpu_matmul_dtype():
    arguments = {"weights": torch.bfloat16, "device": torch.device("cuda"), "coordinator": Solo()}
    assert CpuMatmul.choose("auto", **arguments) is None
    with pytest.raises(ValueError, match=f"{FLAG} fp32"):
        CpuMatmul.choose("fp32", **arguments)
    arguments |= {"weights": torch.float32, "device": CPU}
    assert CpuMatmul.choose("auto", **arguments) is None


def test_run_logs_and_saves_its_cpu_matmul_dtype(tmp_path, capfd):
    """Another dtype changes the losses; a resumed run with another dtype logs a warning."""
    prefix = write_tokens(tmp_path / "tokens")
    base = "--bf16 --eval-interval 0 --lr-warmup-iters 0 --train-iters 2"
    dtypes = {"weights": "bfloat16", "fp32": "float32"}
    for word, dtype in dtypes.items():
        folder = tmp_path / word
        assert run_in_process(flags(prefix, f"{base} {FLAG} {word} --save {folder}")) == 0
        assert f"multiplied in {dtype}" in capfd.readouterr().out
        assert read_extra(folder / "iter_0000002")["cpu_matmul"] == dtype
    bf16_events, fp32_events = (timeless(tmp_path / word / "metrics.jsonl") for word in dtypes)
    assert bf16_events != fp32_events
    for saved_dtype, new_dtype in itertools.product(dtypes, repeat=2):
        options = f"{base} --train-iters 3 {FLAG} {new_dtype} --load {tmp_path / saved_dtype}"
        assert run_in_process(flags(prefix, options)) == 0
        printed = capfd.readouterr()
        assert (f"{FLAG} {saved_dtype} continues" in printed.out + printed.err) == (
            saved_dtype != new_dtype
        )
