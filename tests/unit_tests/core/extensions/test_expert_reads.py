# SPDX-License-Identifier: Apache-2.0
"""Host reads of row counts by TransformerEngine's grouped product: one per layer."""

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


def _pad_runs_by_loop(rows, counts):
    """Return what `WeightQuantization.padded` computes, one run after the other."""
    padded_runs, indices, start = [], [], 0
    for run in rows.split(counts):
        indices += range(start, start + len(run))
        padded_runs.append(torch.nn.functional.pad(run, (0, 0, 0, -len(run) % MULTIPLE)))
        start += len(padded_runs[-1])
    return torch.cat(padded_runs), [len(run) for run in padded_runs], indices


def _layer_reads(rank, world):
    """Return the host reads of row counts by a layer, and check the padding of runs."""
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
        padded, padded_lengths, index = module.WeightQuantization.padded(quantization, rows, runs)
        expected, expected_lengths, indices = _pad_runs_by_loop(rows, lengths)
        assert padded_lengths == expected_lengths
        assert torch.equal(padded, expected)
        assert (index is None) == all(length % MULTIPLE == 0 for length in lengths)
        assert index is None or index.tolist() == indices
    return reads


def test_counts_are_read_once_per_layer():
    (reads,) = run_ranks(_layer_reads, 1)
    assert reads == [EXPERTS]
