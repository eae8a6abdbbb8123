# SPDX-License-Identifier: Apache-2.0
"""The races of recurrent layers' exchange: every form does the same, in the collectives it says."""

from __future__ import annotations

import torch

from tests.support.ranks import run_ranks
from tools.bench import hybrid_step, linear_exchange
from tools.bench.__main__ import BENCHES


def test_all_forms_of_the_exchange_do_the_same():
    # It raises where sections, tokens, gradients or numbers of collectives differ.
    for found in run_ranks(linear_exchange.measured, 2, 32, (1, 4), 1, torch.bfloat16):
        assert {key: len(taken) for key, taken in found.items()} == {
            (form.__name__, count): 1 for form in linear_exchange.FORMS for count in (1, 4)
        }


def test_steps_differ_by_their_exchanges_alone():
    layers = hybrid_step.PATTERN.count("G")
    for found, sent in run_ranks(hybrid_step.measured, 2, 32, 4, 1):
        assert {name: len(steps) for name, steps in found.items()} == {"ours": 1, "per sequence": 1}
        # 5 sections there and 1 back, both ways, of 4 sequences.
        assert sent["per sequence"] - sent["ours"] == layers * (12 * 4 - 4)


def test_both_are_among_the_benches():
    assert {"linear_exchange", "hybrid_step"} <= set(BENCHES)
