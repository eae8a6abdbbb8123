# SPDX-License-Identifier: Apache-2.0
"""What kernels are started with: the default, unless a device has measured something better."""

import json
from importlib.resources import files

import pytest
import torch

from megatron.core.ops import launches
from megatron.core.ops.launches import Launches, cdiv, next_power_of_2

SWEEP = Launches(
    "sweep", {"BLOCK": 64, "num_warps": 4}, alternatives=({"BLOCK": 32, "num_warps": 8},)
)


class FakeTensor:
    device = torch.device("cuda", 0)


def test_candidates_begin_with_the_default():
    assert SWEEP.candidates == ({"BLOCK": 64, "num_warps": 4}, {"BLOCK": 32, "num_warps": 8})


def test_a_candidate_names_what_the_default_names():
    with pytest.raises(ValueError, match="launches of sweep"):
        Launches("sweep", {"BLOCK": 64}, alternatives=({"ROWS": 64},))


def test_a_processor_takes_the_default():
    found = SWEEP.pick(torch.zeros(1))
    found["BLOCK"] = 1  # the caller's own
    assert SWEEP.pick(torch.zeros(1)) == {"BLOCK": 64, "num_warps": 4}


def test_a_device_takes_what_was_measured_there(monkeypatch):
    table = {
        "sweep k128": {"BLOCK": 32, "num_warps": 8},
        "sweep k256": {"BLOCK": 12345, "num_warps": 8},  # of an older candidate
    }
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: asked.append(index) or "Card")
    launches._device_name.cache_clear()
    monkeypatch.setattr(launches, "measured_launches", lambda name: {"Card": table}[name])
    assert SWEEP.pick(FakeTensor(), "k128") == {"BLOCK": 32, "num_warps": 8}
    assert SWEEP.pick(FakeTensor(), "k256") == SWEEP.default
    assert SWEEP.pick(FakeTensor(), "k64") == SWEEP.default
    assert len(asked) == 1, "CUDA is asked at every launch"
    launches._device_name.cache_clear()


def test_what_another_release_of_triton_compiled_is_passed_over():
    entries = {
        name: {"launch": {"BLOCK": size}, "versions": {"triton": release}}
        for name, size, release in (("a", 1, "3.4.0"), ("b", 2, "3.6.0"))
    }
    assert launches.launches_of_release(entries, "3.6.0") == {"b": {"BLOCK": 2}}


def test_the_table_holds_entries_by_device():
    pytest.importorskip("triton")
    text = files("megatron.core.ops").joinpath("launches.json").read_text("utf-8")
    for entries in json.loads(text).values():
        for entry in entries.values():
            assert {"launch", "versions"} <= entry.keys()
    assert launches.measured_launches("a device that nobody has") == {}


def test_rounding_on_the_host_equals_tritons() -> None:
    """`cdiv` and `next_power_of_2` take no time of `triton`'s, and give its numbers."""
    triton = pytest.importorskip("triton")
    numbers = [*range(70), 127, 128, 129, (1 << 31) - 1, 1 << 31, (1 << 31) + 1]
    assert [next_power_of_2(n) for n in numbers] == [triton.next_power_of_2(n) for n in numbers]
    for y in (1, 2, 3, 16, 128):
        assert [cdiv(n, y) for n in numbers] == [triton.cdiv(n, y) for n in numbers]
