# SPDX-License-Identifier: Apache-2.0
"""What a bf16 run on a CPU multiplies in: one choice for all ranks, told, and kept when resumed."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.core.dist_checkpointing import Solo, read_extra
from megatron.core.ops import backend_choice
from megatron.training.cpu_matmul import CpuMatmul
from tests.functional_tests.small_run import flags, run_here, timeless, write_tokens

FLAG = "--cpu-matmul-dtype"
CPU = torch.device("cpu")


class Second(Solo):
    """The second of two ranks, whose first one has measured the other way."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        self.rank, self._answer = 1, answer

    def _exchange(self, stage, message, decide):
        return decide([{"value": self._answer}, message])


@pytest.mark.parametrize(("narrow", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_every_rank_takes_what_the_first_has_measured(narrow, dtype, monkeypatch):
    def measured() -> float:
        raise AssertionError("the second rank measures too")

    monkeypatch.setattr(backend_choice, "cpu_bf16_speedup", measured)
    rank = Second([narrow, 2.0])
    chosen = CpuMatmul.choose("auto", weights=torch.bfloat16, device=CPU, coordinator=rank)
    assert chosen is not None
    assert (chosen.dtype, chosen.speedup) == (dtype, 2.0)


def test_there_is_no_choice_for_fp32_or_on_a_gpu():
    given = {"weights": torch.bfloat16, "device": torch.device("cuda"), "coordinator": Solo()}
    assert CpuMatmul.choose("auto", **given) is None
    with pytest.raises(ValueError, match=f"{FLAG} fp32"):
        CpuMatmul.choose("fp32", **given)
    given |= {"weights": torch.float32, "device": CPU}
    assert CpuMatmul.choose("auto", **given) is None


def test_a_run_tells_and_records_what_it_multiplies_in(tmp_path, capfd):
    """Another choice changes the losses; a run that goes on with another one says so."""
    prefix = write_tokens(tmp_path / "tokens")
    base = "--bf16 --eval-interval 0 --lr-warmup-iters 0 --train-iters 2"
    chosen = {"weights": "bfloat16", "fp32": "float32"}
    for word, dtype in chosen.items():
        folder = tmp_path / word
        assert run_here(flags(prefix, f"{base} {FLAG} {word} --save {folder}")) == 0
        assert f"multiplied in {dtype}" in capfd.readouterr().out
        assert read_extra(folder / "iter_0000002")["cpu_matmul"] == dtype
    first, second = (timeless(tmp_path / word / "metrics.jsonl") for word in chosen)
    assert first != second
    for saved, now in itertools.product(chosen, repeat=2):
        more = f"{base} --train-iters 3 {FLAG} {now} --load {tmp_path / saved}"
        assert run_here(flags(prefix, more)) == 0
        told = capfd.readouterr()
        assert (f"{FLAG} {saved} continues" in told.out + told.err) == (saved != now)
