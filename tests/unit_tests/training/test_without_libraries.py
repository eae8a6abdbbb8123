# SPDX-License-Identifier: Apache-2.0
"""Options where only torch and numpy are installed: no tyro, rich or PyYAML."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.unit_tests.training.small_config import ARGUMENTS

#: Makes the libraries unimportable, then is the program.
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
def test_what_needs_no_library_works_without(words, text):
    done = run(*words)
    assert done.returncode == 0, done.stderr
    assert text in done.stdout


def test_a_yaml_file_says_what_it_needs():
    done = run("--config", "run.yaml")
    assert done.returncode == 2
    assert done.stderr == (
        "pretrain_gpt: error: --config needs PyYAML: pip install pyyaml, or give flags\n"
    )
