# SPDX-License-Identifier: Apache-2.0
"""Faults of experts, latent attention and MTP that the parity rows must detect.

The first three are the most common silent faults in such code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Fault = tuple[str, str, str, str, dict[str, Any]]

#: name: (module, function, code, faulty code, settings of a row that shows the fault)
EXPERT_FAULTS: Mapping[str, Fault] = {
    "gradients of experts are a mean over ep": (
        "weight_gather.handle",
        "_wgrad_",
        "grad.to(dtype)",
        "grad.to(dtype) / 2",
        {"tp": 1, "dp": 2, "experts": "softmax", "ep": 2},
    ),
    "gradients of experts are off by etp / tp": (
        "weight_gather.handle",
        "_wgrad_",
        "grad.to(dtype)",
        "grad.to(dtype) * 2",
        {"tp": 2, "dp": 1, "experts": "softmax", "etp": 1, "ep": 2},
    ),
    "the router's gradient is not summed over tp": (
        "moe.router",
        "Router.__init__",
        '"partial"',
        '"identical"',
        {"experts": "softmax", "etp": 2},
    ),
    "experts are summed over the data-parallel ranks of dense weights": (
        "weight_sharding",
        "gradient_plan",
        '"expert_dp" if sharding.expert else "dense_dp"',
        '"dense_dp"',
        {"tp": 1, "dp": 2, "experts": "softmax", "ep": 2},
    ),
    "gradients of gathered routing weights stay with their owner": (
        "moe.dispatch",
        "_by_all_gather",
        "partial_gradient=True",
        "partial_gradient=False",
        {"tp": 1, "dp": 2, "experts": "softmax", "ep": 2, "dispatcher": "allgather"},
    ),
    "a rank picks the tokens of its neighbour's experts": (
        "moe.dispatch",
        "ExpertRanks.first_expert",
        "self.group.rank // self.etp * self.num_local",
        "(self.group.size - 1 - self.group.rank) // self.etp * self.num_local",
        {"tp": 1, "dp": 2, "experts": "softmax", "ep": 2, "dispatcher": "allgather"},
    ),
    "loads are balanced over one rank's tokens": (
        "moe.router",
        "Router._balanced",
        "all_reduce(local_tokens, self.group)",
        "local_tokens",
        {"experts": "sigmoid", "etp": 2},
    ),
    "biases drive tokens to the busy experts": (
        "moe.router",
        "Balance.finish",
        "tokens.mean() - tokens",
        "tokens - tokens.mean()",
        {"tp": 1, "dp": 2, "experts": "sigmoid", "ep": 2},
    ),
    "experts have room for one token more": (
        "moe.router",
        "within_capacity",
        "index_in_expert < capacity",
        "index_in_expert <= capacity",
        {"tp": 1, "dp": 2, "experts": "softmax", "ep": 2, "capacity": "position"},
    ),
    "rows of a token's experts come back in the wrong order": (
        "moe.dispatch",
        "_by_all_to_all",
        "sum_rows(combined, send_permutation, weights=weights)",
        "sum_rows(combined, send_permutation, weights=weights.flip(1))",
        {"tp": 1, "dp": 2, "experts": "softmax", "ep": 2},
    ),
    "rotated key features keep the gradient of this rank's heads": (
        "transformer.latent_attention",
        "LatentAttention._project",
        "copy_to_group(key_rope, group)",
        "key_rope",
        {"attention": "latent", "groups": 8},
    ),
    "tokens of the next document are predicted": (
        "models.gpt",
        "shift_targets",
        "document_ids[:, near] == document_ids[:, far]",
        "document_ids[:, near] >= 0",
        {"tp": 1, "dp": 2, "predictions": 1, "documents": "packed"},
    ),
}
