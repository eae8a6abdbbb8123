# SPDX-License-Identifier: Apache-2.0
"""How many flags of Megatron-LM's functional tests are accepted does not fall."""

from __future__ import annotations

from tools.upstream_flags import figures, is_accepted


def test_as_many_of_upstreams_flags_are_accepted_as_before():
    found = figures()
    assert (found.uses, found.configs) == (15365, 221)
    assert found.accepted >= 14400
    assert found.flags - found.refused.total() >= 12358
    assert found.unchanged >= 140


def test_a_value_counts_with_its_flag():
    assert is_accepted(["--ckpt-format", "torch_dist"])
    assert not is_accepted(["--ckpt-format", "torch"])
    assert is_accepted(["--seed", "${REPEAT}"])
    assert is_accepted(["--fp8-format", "hybrid"])
    assert not is_accepted(["--fp8-format", "e5m2"])
