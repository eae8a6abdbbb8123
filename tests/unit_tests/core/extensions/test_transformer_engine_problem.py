# SPDX-License-Identifier: Apache-2.0
"""Why TransformerEngine cannot be used is said in one line, with the fix."""

import importlib.metadata

import pytest

from megatron.core.extensions import transformer_engine_problem


@pytest.mark.parametrize(
    ("release", "said"),
    [
        (None, "TransformerEngine is not installed"),
        ("2.18.0", "TransformerEngine 2.18.0 has no distributed weights"),
        ("2.19rc1", "TransformerEngine 2.19rc1 cannot be used (No module named"),
        ("3.0.1+cu13", "TransformerEngine 3.0.1+cu13 cannot be used (No module named"),
    ],
)
def test_each_problem_is_a_line_with_the_fix(release, said, monkeypatch):
    def version(name):
        if release is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return release

    monkeypatch.setattr(importlib.metadata, "version", version)
    problem = transformer_engine_problem()
    assert problem is not None
    assert problem.startswith(said)
    assert "pip install 'megatron-lm[te]'" in problem
    assert "\n" not in problem
