# SPDX-License-Identifier: Apache-2.0
"""Counts of rows that TransformerEngine's grouped product takes from the host, once a layer."""

import importlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron.core.moe import MoEConfig, RouterConfig
from megatron.core.ops.grouped_mm import RowRuns
from tests.support import te_extension, te_wheel
from tests.support.inputs import generator
from tests.support.ranks import run_ranks
from tests.unit_tests.core.moe.single_layer import Layer

pytestmark = pytest.mark.skipif(not te_wheel.is_there(), reason="run make te-wheels")

H, EXPERTS, MULTIPLE = 16, 4, 8
#: Rows of dropped tokens follow the runs.
DROPS = MoEConfig(
    num_experts=EXPERTS, ffn_hidden_size=8, router=RouterConfig(topk=2), capacity_factor=0.6
)


def _padded_by_hand(rows, counts):
    """Return what `padded` does, run after run."""
    parts, places, start = [], [], 0
    for part in rows.split(counts):
        places += range(start, start + len(part))
        parts.append(torch.nn.functional.pad(part, (0, 0, 0, -len(part) % MULTIPLE)))
        start += len(parts[-1])
    return torch.cat(parts), [len(part) for part in parts], places


def _by_te(rank, world):
    """Return how often counts are read by a layer, and check how runs are padded."""
    te_extension.install(te_wheel.tree())
    module = importlib.import_module("megatron.core.extensions.transformer_engine")
    reads = []
    counts = RowRuns.counts.func

    def counted(runs):
        reads.append(len(runs.ends))
        return counts(runs)

    with mock.patch.object(RowRuns.counts, "func", counted):
        layer = Layer(DROPS, hidden_size=H, grouped_linear=module.TEGroupedLinear)
        hidden, factors = (torch.randn(6, 3, H, generator=generator(i)) for i in range(2))
        out, _ = layer.step(hidden, factors)
    assert te_extension.CALLS["GroupedLinear"] == 2
    plain, _ = Layer(DROPS, hidden_size=H).step(hidden, factors)
    torch.testing.assert_close(out, plain)
    quantization = SimpleNamespace(config=SimpleNamespace(weight_multiple=MULTIPLE))
    for lengths in ([3, 0, 8, 0, 13], [0, 0, 1], [8, 16], [0]):
        rows = torch.randn(sum(lengths), H, generator=generator(len(lengths)))
        runs = RowRuns.of(torch.tensor(lengths))
        found, longer, index = module.WeightQuantization.padded(quantization, rows, runs)
        expected, expected_lengths, places = _padded_by_hand(rows, lengths)
        assert longer == expected_lengths
        assert torch.equal(found, expected)
        assert (index is None) == all(length % MULTIPLE == 0 for length in lengths)
        assert index is None or index.tolist() == places
    return reads


def test_counts_are_read_once_for_all_products_of_a_layer():
    (reads,) = run_ranks(_by_te, 1)
    assert reads == [EXPERTS]
