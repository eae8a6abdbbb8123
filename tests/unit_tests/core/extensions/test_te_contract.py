# SPDX-License-Identifier: Apache-2.0
"""The contract check detects drift between this package and a release of TransformerEngine."""

import shutil
import sys

import pytest

from tests.support import te_contract, te_wheel

CHANGES = {
    "renamed argument": ("module/linear.py", "fuse_wgrad_accumulation: bool", "fuse_wgrad: bool"),
    "renamed method": (
        "distributed_weight.py", "def finalize_group_grads", "def finalize_gradients",
    ),
    "added argument": (
        "distributed_weight.py",
        "def materialize_group_for_forward(self)",
        "def materialize_group_for_forward(self, stream)",
    ),
    "changed put signature": (
        "module/_common.py", "def put(self, tensor_list, func)", "def put(self, func)",
    ),
    "renamed format": (
        "../common/recipe/__init__.py", "    HYBRID = _FormatHelper", "    MIXED = _FormatHelper",
    ),
    "renamed field": (
        "../common/recipe/__init__.py", "amax_history_len: int = 1024", "history: int = 1024",
    ),
}  # fmt: skip


@pytest.mark.parametrize("release", te_wheel.releases())
def test_tested_release_has_no_drift(release, monkeypatch, capsys):
    if not te_wheel.is_there(release):
        pytest.skip(f"TransformerEngine {release} is not in build/: run make te-wheels")
    monkeypatch.setattr(sys, "argv", ["te_contract", str(te_wheel.tree(release))])
    assert te_contract.main() == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert len(rows) == len(te_contract.CONTRACT)
    assert all(row.split()[1] == "ok" for row in rows)


@pytest.mark.skipif(not te_wheel.is_there(), reason="run make te-wheels")
@pytest.mark.parametrize("name", CHANGES)
def test_planted_drift_is_reported_in_one_line(name, tmp_path):
    path, old, new = CHANGES[name]
    uses = tuple(use for use in te_contract.CONTRACT if use.path == path)
    target = tmp_path / "transformer_engine" / "pytorch" / path
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(te_wheel.tree() / "transformer_engine" / "pytorch" / path, target)
    assert not list(te_contract.drifts(tmp_path, uses))
    text = target.read_text()
    assert old in text
    target.write_text(text.replace(old, new))
    assert len(list(te_contract.drifts(tmp_path, uses))) == 1
