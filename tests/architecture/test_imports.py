# SPDX-License-Identifier: Apache-2.0
"""Imports within core and between the applications point down the layers, imports of the wheels
have no cycles, and a planted import that breaks a rule is found."""

from __future__ import annotations

import os
import re
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


#: Forbidden imports: package of the importing module, the module, and the added line.
PLANTED = (
    ("core", "device", "import megatron.core.process_groups"),  # to the layer above
    ("core", "process_groups", "def _late():\n    from megatron.core.comm import collectives"),
    ("core", "ops.planted", "from megatron.core.optimizer import schedule"),  # two layers up
    ("core", "optimizer.planted", "import megatron.core.datasets.gpt_dataset"),  # beside
    ("core", "boxes", "import tests.support.ranks"),
    ("core", "datasets.planted", "import experimental"),
    ("core", "cpu_graph", "import megatron.cli.errors"),
    ("cli", "planted", "import megatron.hf.folder"),
    ("hf", "planted", "def late():\n    import megatron.training.session"),
    ("training", "data.planted", "from megatron.inference import generate"),
    ("training", "monitoring.planted", "def late():\n    import experimental.splits"),
    ("training", "step", "def late():\n    import megatron.training.session"),
    ("inference", "planted", "import experimental"),
)


def plant(root: Path, package: str, module: str, line: str) -> None:
    """Append a line to a module of the copy, which is created if it is missing."""
    tree = root / "megatron_core/megatron" if package == "core" else root / "megatron"
    file = tree / package / f"{module.replace('.', '/')}.py"
    before = file.read_text(encoding="utf-8") if file.exists() else HEAD
    file.write_text(f"{before}\n{line}\n", encoding="utf-8")


def test_planted_imports_break_contracts(copy: Path) -> None:
    for planted in PLANTED:
        plant(copy, *planted)
    status, output = lint_imports(copy)
    assert status == 1
    imports = set(re.findall(r"(\S+) -> (\S+)", output))
    for package, module, line in PLANTED:
        imported = ".".join(re.findall(r"(?:from|import) (\S+)", line))
        importer = f"megatron.{package}.{module}"
        assert any(a == importer and imported.startswith(b) for a, b in imports), (importer, output)


@pytest.mark.parametrize("package", ["core", "training"])
def test_module_without_a_layer_is_reported(copy: Path, package: str) -> None:
    plant(copy, package, "nowhere", "import torch")
    status, output = lint_imports(copy)
    assert (status, "nowhere" in output) == (1, True)


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


def test_planted_arrows_up_are_counted() -> None:
    layers, session = layer_order(ROOT, TRAINING), f"{TRAINING}.session"
    importers = [f"{TRAINING}.{name}" for name in ("step", "monitoring.planted", "restore")]
    graph = {session: set(), **{importer: {session} for importer in importers}}
    upward = {(importer, session) for importer in importers[:2]}
    assert set(arrows_up(graph, layers, TRAINING)) == upward


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
