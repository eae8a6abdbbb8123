# SPDX-License-Identifier: Apache-2.0
"""Launch options of kernels: the default, unless a faster candidate was measured on the device."""

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


def test_default_is_the_first_candidate():
    assert SWEEP.candidates == ({"BLOCK": 64, "num_warps": 4}, {"BLOCK": 32, "num_warps": 8})


def test_candidate_must_have_the_options_of_the_default():
    with pytest.raises(ValueError, match="launches of sweep"):
        Launches("sweep", {"BLOCK": 64}, alternatives=({"ROWS": 64},))


def test_cpu_uses_the_default_launch():
    launch = SWEEP.pick(torch.zeros(1))
    launch["BLOCK"] = 1  # the caller owns the returned dict
    assert SWEEP.pick(torch.zeros(1)) == {"BLOCK": 64, "num_warps": 4}


def test_device_uses_its_measured_launch(monkeypatch):
    table = {
        "sweep k128": {"BLOCK": 32, "num_warps": 8},
        "sweep k256": {"BLOCK": 12345, "num_warps": 8},  # no longer a candidate
    }
    queried_devices = []
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda index: queried_devices.append(index) or "Card"
    )
    launches._device_name.cache_clear()
    monkeypatch.setattr(launches, "measured_launches", lambda name: {"Card": table}[name])
    assert SWEEP.pick(FakeTensor(), "k128") == {"BLOCK": 32, "num_warps": 8}
    assert SWEEP.pick(FakeTensor(), "k256") == SWEEP.default
    assert SWEEP.pick(FakeTensor(), "k64") == SWEEP.default
    assert len(queried_devices) == 1, "the device name is queried at every launch"
    launches._device_name.cache_clear()


def test_launches_of_other_triton_releases_are_ignored():
    entries = {
        name: {"launch": {"BLOCK": size}, "versions": {"triton": release}}
        for name, size, release in (("a", 1, "3.4.0"), ("b", 2, "3.6.0"))
    }
    assert launches.launches_of_release(entries, "3.6.0") == {"b": {"BLOCK": 2}}


def test_launch_table_has_entries_by_device():
    pytest.importorskip("triton")
    text = files("megatron.core.ops").joinpath("launches.json").read_text("utf-8")
    for entries in json.loads(text).values():
        for entry in entries.values():
            assert {"launch", "versions"} <= entry.keys()
    assert launches.measured_launches("a device that nobody has") == {}


def test_host_rounding_matches_triton() -> None:
    """Compare `cdiv` and `next_power_of_2` with Triton's slower functions."""
    triton = pytest.importorskip("triton")
    numbers = [*range(70), 127, 128, 129, (1 << 31) - 1, 1 << 31, (1 << 31) + 1]
    assert [next_power_of_2(n) for n in numbers] == [triton.next_power_of_2(n) for n in numbers]
    for y in (1, 2, 3, 16, 128):
        assert [cdiv(n, y) for n in numbers] == [triton.cdiv(n, y) for n in numbers]
