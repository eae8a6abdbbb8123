# SPDX-License-Identifier: Apache-2.0
"""What kernels are started with: the default, unless a device has measured something better."""

import json
from importlib.resources import files

import pytest
import torch

from megatron.core.ops import launches
from megatron.core.ops.launches import Launches

SWEEP = Launches("sweep", {"BLOCK": 64, "num_warps": 4}, others=({"BLOCK": 32, "num_warps": 8},))


class FakeTensor:
    device = torch.device("cuda", 0)


def test_candidates_begin_with_the_default():
    assert SWEEP.candidates == ({"BLOCK": 64, "num_warps": 4}, {"BLOCK": 32, "num_warps": 8})


def test_a_candidate_names_what_the_default_names():
    with pytest.raises(ValueError, match="launches of sweep"):
        Launches("sweep", {"BLOCK": 64}, others=({"ROWS": 64},))


def test_a_processor_takes_the_default():
    found = SWEEP.pick(torch.zeros(1))
    found["BLOCK"] = 1  # the caller's own
    assert SWEEP.pick(torch.zeros(1)) == {"BLOCK": 64, "num_warps": 4}


def test_a_device_takes_what_was_measured_there(monkeypatch):
    table = {"sweep k128": {"BLOCK": 32, "num_warps": 8}}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card")
    monkeypatch.setattr(launches, "measured_launches", lambda name: {"Card": table}[name])
    assert SWEEP.pick(FakeTensor(), "k128") == {"BLOCK": 32, "num_warps": 8}
    assert SWEEP.pick(FakeTensor(), "k64") == SWEEP.default


def test_the_table_holds_launches_by_device():
    text = files("megatron.core.ops").joinpath("launches.json").read_text("utf-8")
    for device, entries in json.loads(text).items():
        assert launches.measured_launches(device).keys() == entries.keys()
    assert launches.measured_launches("a device that nobody has") == {}
