# SPDX-License-Identifier: Apache-2.0
"""Faults of recurrent mixers and of gated attention that the parity rows must detect."""

from __future__ import annotations

from collections.abc import Mapping

from tests.parity.expert_faults import Fault

_DELTA = {"tp": 1, "cp": 2, "mixer": "delta"}
_MAMBA = {"tp": 1, "cp": 2, "mixer": "mamba"}

#: name: (module, function, code, faulty code, settings of a row that shows the fault)
HYBRID_FAULTS: Mapping[str, Fault] = {
    "a norm sees some of the value heads, and nobody sums its gradient": (
        "ssm.gated_delta_net",
        "GatedDeltaNet._declare",
        '"tp": "partial"',
        '"tp": "identical"',
        {"mixer": "delta"},
    ),
    "decays are those of value heads in another order": (
        "ops.recurrence.prologue.cpu",
        "recurrence_inputs",
        "decay = -a_log.exp()",
        "decay = -a_log.view(heads, -1).mT.exp()",
        {"mixer": "delta"},
    ),
    "a rank takes the weights of its neighbour's heads": (
        "ssm.mixer",
        "UnitShard.of",
        "[self.index]",
        "[self.index - 1]",
        _DELTA,
    ),
    "tokens come back by the map that took them": (
        "ops.sequences",
        "PackingIndices.of",
        "tokens[rows] = np.arange(len(rows))",
        "tokens[np.arange(len(rows))] = rows",
        _MAMBA,
    ),
    "states go on into the next document": (
        "context_parallel.packed_tokens",
        "whole_rows",
        "[row * len(columns) + end for end in ends[1:]]",
        "[row * len(columns) + ends[-1]]",
        {**_DELTA, "documents": "packed"},
    ),
    "a convolution borrows tokens of the document before": (
        "context_parallel.packed_tokens",
        "_halo_ranges",
        "skipped = max(0, begin - (top + transfer.row))",
        "skipped = 0",
        {**_DELTA, "linear_mode": "segments", "documents": "packed"},
    ),
    "gradients of states are multiplied by what is not transposed": (
        "ssm.state_passing",
        "_final_gradients",
        "transposed=True",
        "transposed=False",
        {**_DELTA, "linear_mode": "segments"},
    ),
    "states are folded from one rank's summaries": (
        "ssm.state_passing",
        "StateExchange.of",
        "slot = transfer.source * num_exports + transfer.export",
        "slot = group.rank * num_exports + transfer.export",
        {**_MAMBA, "linear_mode": "segments"},
    ),
    "ranks that hold the same group keep their own gradients": (
        "weight_sharding",
        "gradient_plan",
        "elif num_shards < size:",
        "elif num_shards > size:",
        {"mixer": "mamba", "mamba_groups": 1},
    ),
    "copies of a group meet heads in another order": (
        "ssm.mamba2",
        "Mamba2.replicate_shared",
        "columns.unflatten(-1, (copies, -1))",
        "columns.unflatten(-1, (-1, copies)).mT",
        {**_MAMBA, "mamba_groups": 1},
    ),
    "squares of a norm on several ranks are summed in forward alone": (
        "ssm.mamba2",
        "Mamba2._apply_norm",
        "copy_to_group(reduce_from_group(squares, self._tp), self._tp)",
        "reduce_from_group(squares, self._tp)",
        {"mixer": "mamba", "norm_groups": 1},
    ),
    "heads are gated by their neighbour": (
        "transformer.attention",
        "SelfAttention._gated",
        "out * self._sigmoid(gate)",
        "out * self._sigmoid(gate.roll(1, -2))",
        {"attention_gate": True},
    ),
    "feature off: the mode of recurrences that was asked for": (
        "ssm.mixer",
        "RecurrentMixer._mode",
        "choose_mode(self.context.linear_mode,",
        'choose_mode("auto",',
        {**_DELTA, "linear_mode": "segments"},
    ),
}
