# SPDX-License-Identifier: Apache-2.0
"""Options when only torch and numpy are installed: no tyro, rich or PyYAML."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.unit_tests.training.small_config import ARGUMENTS

#: Program that blocks the imports of these libraries and then runs the entry point.
BLOCKED = """
import runpy, sys
for name in ("tyro", "rich", "yaml"):
    sys.modules[name] = None
sys.argv[0] = "program"
runpy.run_module("megatron.training.pretrain_gpt", run_name="__main__")
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED, *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["--help"],
            "--num-layers INT  Number of transformer layers, each with one",
        ),
        (["--print-completion", "bash"], "complete -o default -F _megatron_complete"),
        ([*ARGUMENTS.split(), "--print-config"], 'normalization: "LayerNorm"'),
    ],
)
def test_entry_point_works_without_optional_libraries(words, text):
    process = run(*words)
    assert process.returncode == 0, process.stderr
    assert text in process.stdout


def test_yaml_config_without_pyyaml_names_the_package():
    process = run("--config", "run.yaml")
    assert process.returncode == 2
    assert process.stderr == (
        "pretrain_gpt: error: --config needs PyYAML: pip install pyyaml, or give flags\n"
    )
