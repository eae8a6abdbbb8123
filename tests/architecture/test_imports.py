# SPDX-License-Identifier: Apache-2.0
"""Imports within core and between the applications point down the layers, imports of the wheels
have no cycles, and a planted import that breaks a rule is found."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.code_figures import TRAINING, arrows_up, circles, import_graph, layer_order, read_modules

ROOT = Path(__file__).resolve().parents[2]
HEAD = '# SPDX-License-Identifier: Apache-2.0\n"""Planted."""\n'


def lint_imports(root: Path) -> tuple[int, str]:
    """Return the exit status and the output of import-linter over the tree at `root`."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    command += ["--config", str(root / "pyproject.toml")]
    # The copy's part of the namespace comes before the installed package.
    path = os.pathsep.join([str(root / "megatron_core"), str(root)])
    environment = {**os.environ, "PYTHONPATH": path, "NO_COLOR": "1"}
    process = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=60
    )
    return process.returncode, process.stdout + process.stderr


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Copy the wheels and the contracts to a temporary folder and return it."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for tree in ("megatron_core/megatron", "megatron"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / tree, tmp_path / tree, ignore=ignore)
    return tmp_path


def test_imports_follow_the_layers() -> None:
    status, output = lint_imports(ROOT)
    assert status == 0, output


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("device.py", "import megatron.core.process_groups"),
        ("process_groups.py", "def _late():\n    from megatron.core.comm import collectives"),
        ("ops/planted.py", "from megatron.core.optimizer import schedule"),
        ("optimizer/planted.py", "import megatron.core.datasets.gpt_dataset"),
        ("device.py", "import tests.support.ranks"),
        ("datasets/planted.py", "import experimental"),
        ("nowhere.py", "import torch"),
        ("/megatron/cli/planted.py", "import megatron.hf.folder"),
        ("/megatron/hf/planted.py", "def late():\n    import megatron.training.session"),
        ("/megatron/training/data/planted.py", "from megatron.inference import generate"),
        ("/megatron/inference/planted.py", "import experimental"),
        ("/megatron/training/data/planted.py", "def late():\n    import experimental.splits"),
        ("device.py", "import megatron.cli.errors"),
        ("/megatron/training/step.py", "def late():\n    import megatron.training.session"),
        ("/megatron/training/nowhere.py", "import torch"),
    ],
    ids=[
        "to the layer above",
        "inside a function",
        "two layers up",
        "beside",
        "tests",
        "experimental",
        "module without a layer",
        "command line to Hugging Face",
        "Hugging Face to training",
        "training to inference",
        "inference to experimental",
        "training to experimental",
        "core to the applications",
        "step to session",
        "module of training without a layer",
    ],
)
def test_planted_import_breaks_a_contract(copy: Path, path: str, line: str) -> None:
    core = "/megatron_core/megatron/core/"
    file = copy / (path if path.startswith("/") else core + path).removeprefix("/")
    before = file.read_text(encoding="utf-8") if file.exists() else HEAD
    file.write_text(f"{before}\n{line}\n", encoding="utf-8")
    status, output = lint_imports(copy)
    assert status == 1
    assert "BROKEN" in output or "not listed as layers" in output, output
    assert file.stem in output


def test_pretraining_imports_few_modules() -> None:
    graph = import_graph(read_modules(ROOT))
    assert len(graph["megatron.training.pretraining"]) <= 15


def test_imports_have_no_cycles() -> None:
    modules = read_modules(ROOT)
    assert len(modules) > 100
    assert circles(import_graph(modules)) == []


def test_few_imports_of_training_point_up() -> None:
    layers = layer_order(ROOT, TRAINING)
    assert layers["pretraining"] < layers["session"] < layers["step"] < layers["config"]
    assert len(arrows_up(import_graph(read_modules(ROOT)), layers, TRAINING)) <= 3


def test_planted_arrows_up_are_counted(copy: Path) -> None:
    layers = layer_order(copy, TRAINING)
    before = set(arrows_up(import_graph(read_modules(copy)), layers, TRAINING))
    late = "def late():\n    from megatron.training.session import Session\n"
    for name in ("step.py", "monitoring/planted.py", "restore.py"):
        with (copy / "megatron/training" / name).open("a") as file:
            file.write(f"\n{late}")
    after = arrows_up(import_graph(read_modules(copy)), layers, TRAINING)
    session = f"{TRAINING}.session"
    assert {*after} - before == {
        (f"{TRAINING}.step", session),
        (f"{TRAINING}.monitoring.planted", session),
    }


@pytest.mark.parametrize(
    "late",
    [
        "def late():\n    from megatron.training import one",
        "if TYPE:\n    import megatron.training.one",
    ],
    ids=["inside a function", "for types"],
)
def test_planted_import_cycle_is_reported(tmp_path: Path, late: str) -> None:
    folder = tmp_path / "megatron/training"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(HEAD)
    (folder / "one.py").write_text(f"{HEAD}from megatron.training.two import late\n")
    (folder / "two.py").write_text(f"{HEAD}{late}\n")
    cycles = circles(import_graph(read_modules(tmp_path)))
    assert cycles == [["megatron.training.one", "megatron.training.two"]]
