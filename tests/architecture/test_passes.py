# SPDX-License-Identifier: Apache-2.0
"""Launches and bytes of a training step, counted on meta tensors."""

import dataclasses

import pytest
import torch

from tests.support.passes import LaunchTape, launches_of
from tools.bench.shapes import Shape


def traffic_of(function, *shapes, dtype=torch.float32):
    """Return [(name, bytes)] of the launches of a function of meta tensors."""
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
def test_traffic_of_operations_is_counted(function, shapes, expected):
    assert traffic_of(function, *shapes) == expected


SHAPE = Shape(
    layers=1, hidden=256, ffn=704, heads=4, kv_heads=2, vocabulary=512, batch=2, sequence=128
)


def grown(steps):
    """Return the additional launches of one more period of layers, by name: (launches, bytes)."""
    launches_by_name = {}
    for launches, sign in zip(steps, (-1, 1), strict=True):
        for launch in launches:
            number, traffic = launches_by_name.get(launch.name, (0, 0))
            launches_by_name[launch.name] = number + sign, traffic + sign * launch.traffic
    return {name: pair for name, pair in launches_by_name.items() if pair[0]}


def test_llama_layer_traffic_matches_closed_form():
    """There is no copy, cast or concatenation: the closed form below has all launches."""
    launches_by_name = grown([launches_of(dataclasses.replace(SHAPE, layers=n)) for n in (1, 2)])
    tokens, head = SHAPE.tokens, SHAPE.hidden // SHAPE.heads
    row = 2 * tokens  # bytes of one feature of all tokens in bf16
    hidden, ffn = row * SHAPE.hidden, row * SHAPE.ffn
    query, key = row * head * SHAPE.heads, row * head * SHAPE.kv_heads
    table = 2 * 4 * SHAPE.sequence * head // 2
    weight, statistics = 2 * SHAPE.hidden, 4 * tokens
    expected = {
        "rms_norm_forward_kernel": (2, 2 * (4 * hidden + weight + statistics)),
        "rope_kernel": (1, 2 * (query + key) + table),
        "join_heads_kernel": (1, 2 * (query + 2 * key) + table),
        "gated_forward_kernel": (1, 3 * ffn),
        "gated_backward_kernel": (1, 5 * ffn),
        "_scaled_dot_product_cudnn_attention": (1, 0),
        "_scaled_dot_product_cudnn_attention_backward": (1, 0),
        "mm": (12, 0),
    }
    assert {name: launches_by_name.pop(name) for name in expected} == expected
    # The weight gradients of norms: partial sums of programs, reduced into the main grad.
    assert launches_by_name.keys() == {"rms_norm_backward_kernel", "sum"}
    addends = sum(traffic for _, traffic in launches_by_name.values())
    remaining = addends - 2 * (4 * hidden + weight + statistics)
    assert 0 < remaining <= 2 * (2 * tokens + 1) * 4 * SHAPE.hidden
