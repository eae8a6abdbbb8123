# SPDX-License-Identifier: Apache-2.0
"""The exchange benchmarks of recurrent layers: all variants give equal results."""

from __future__ import annotations

import torch

from tests.support.ranks import run_ranks
from tools.bench import hybrid_step, linear_exchange
from tools.bench.__main__ import BENCHES


def test_all_exchange_variants_give_equal_results():
    # `measured` raises if sections, tokens, gradients or numbers of collectives differ.
    for steps_by_form in run_ranks(linear_exchange.measured, 2, 32, (1, 4), 1, torch.bfloat16):
        assert {key: len(steps) for key, steps in steps_by_form.items()} == {
            (form.__name__, count): 1 for form in linear_exchange.FORMS for count in (1, 4)
        }


def test_variants_differ_only_in_bytes_sent():
    layers = hybrid_step.PATTERN.count("G")
    for steps_by_variant, sent in run_ranks(hybrid_step.measured, 2, 32, 4, 1):
        assert {name: len(steps) for name, steps in steps_by_variant.items()} == {
            "ours": 1,
            "per sequence": 1,
        }
        # 5 sections there and 1 back, in forward and backward, of 4 sequences.
        assert sent["per sequence"] - sent["ours"] == layers * (12 * 4 - 4)


def test_exchange_benches_are_registered():
    assert {"linear_exchange", "hybrid_step"} <= set(BENCHES)
