# SPDX-License-Identifier: Apache-2.0
"""Launches and bytes of a training step, counted on meta tensors."""

import dataclasses

import pytest
import torch

from tools.bench.gpu_train import LLAMA_1_3B
from tools.bench.passes import LaunchTape, count


def traffic_of(function, *shapes, dtype=torch.float32):
    """Return [(name, bytes)] of what a function of meta tensors launches."""
    tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    with LaunchTape() as tape:
        function(*tensors)
    return [(launch.name, launch.traffic) for launch in tape.launches]


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (lambda x, y: x + y, [(3, 4), (3, 4)], [("add", 3 * 48)]),
        (lambda x, y: x.add_(y), [(3, 4), (4,)], [("add_", 48 + 16 + 48)]),
        (lambda x: x.mul_(2), [(3, 4)], [("mul_", 96)]),
        (lambda x, y: x.copy_(y.expand(3, 4)), [(3, 4), (1, 4)], [("copy_", 48 + 16)]),
        (lambda x: x.bfloat16(), [(3, 4)], [("_to_copy", 48 + 24)]),
        (lambda x: x.zero_(), [(3, 4)], [("zero_", 48)]),
        (lambda x: torch.zeros_like(x), [(3, 4)], [("zeros_like", 48)]),
        (lambda x, y: torch.cat([x, y]), [(3, 4), (3, 4)], [("cat", 192)]),
        (lambda x: x[:, 1:3].t().reshape(2, 3).sum(0), [(3, 4)], [("sum", 24 + 12)]),
        (lambda x, y: torch.mul(x, x, out=y), [(3, 4), (3, 4)], [("mul", 96)]),
        (lambda x, y: x @ y, [(3, 4), (4, 5)], [("mm", 0)]),
        (lambda x, y: torch.addmm(y, x, x.t(), out=y), [(3, 4), (3, 3)], [("addmm", 36)]),
        (lambda x: x.view(12).detach().new_empty(5), [(3, 4)], []),
    ],
)
def test_bytes_of_operations(function, shapes, expected):
    assert traffic_of(function, *shapes) == expected


def test_bytes_of_a_layer_are_those_of_its_tensors():
    one, two = (count(dataclasses.replace(LLAMA_1_3B, layers=n)).backward for n in (1, 2))
    found = sum(x.traffic for x in two) - sum(x.traffic for x in one)
    assert found > 0
    added = len(two) - len(one)
    # 4 products with 3 passes each, 2 norms, rotation, gate, attention: both ways each.
    assert added >= 12 + 4 + 2 + 2 + 2
