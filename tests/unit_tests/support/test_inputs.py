# SPDX-License-Identifier: Apache-2.0
"""Test inputs differ where equal inputs would hide a bug, and are the same on every run."""

import itertools

import torch

from tests.support.inputs import microbatch, perturbed


def _batch(dp_rank, index):
    return microbatch(seed=5, dp_rank=dp_rank, index=index, batch=3, sequence=19, vocabulary=61)


def test_every_rank_and_microbatch_has_distinct_token_counts():
    microbatches = {key: _batch(*key) for key in itertools.product(range(4), range(3))}
    for (_, a), (_, b) in itertools.combinations(microbatches.items(), 2):
        assert not torch.equal(a.tokens, b.tokens)
        assert not torch.equal(a.sample_ids, b.sample_ids)
    counts = [int(m.loss_mask.sum()) for m in microbatches.values()]
    assert len(set(counts)) >= 8
    assert all(0 < count < 3 * 19 for count in counts)


def test_every_weight_is_perturbed_differently():
    weights = {"norm.weight": torch.ones(7), "other.weight": torch.ones(7), "bias": torch.zeros(7)}
    changed = perturbed(weights, seed=1)
    assert all((changed[name] != weights[name]).all() for name in weights)
    assert not torch.equal(changed["norm.weight"], changed["other.weight"])
    assert torch.equal(changed["bias"], perturbed(weights, seed=1)["bias"])
    assert torch.equal(weights["norm.weight"], torch.ones(7))
