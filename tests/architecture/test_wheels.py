# SPDX-License-Identifier: Apache-2.0
"""Both wheels work in a clean environment without the checkout, with only their dependencies.

The environment is outside the checkout. Its dependencies are links to the installed distributions,
but only to those in the wheels' metadata and their transitive dependencies, so an undeclared import
fails. No path of the checkout and no .pth file of the development environment is visible.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
#: Entry scripts that must start after `pip install megatron-lm`, without extras.
ENTRY_POINTS = (
    "megatron.training.pretrain_gpt",
    "megatron.training.preprocess_data",
    "megatron.training.train_tokenizer",
    "megatron.training.inspect_data",
    "megatron.training.plot",
    "megatron.hf.convert import",
    "megatron.inference.generate",
    "megatron.inference.bench",
    "megatron.inference.serve",
)
#: Packages of extras: a module that imports one of them may fail to import without it.
EXTRAS = (
    "fastapi", "starlette", "pydantic", "uvicorn", "prometheus_client", "llguidance", "triton",
    "transformer_engine", "tensorboard", "matplotlib", "pyarrow", "sentencepiece", "tiktoken",
    "jinja2",
)  # fmt: skip
IMPORT_ALL = f"""
import importlib, pkgutil, sys
for package in map(importlib.import_module, sys.argv[1:]):
    names = [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
    skipped = []
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] not in {EXTRAS!r}:
                raise
            skipped.append(name)
    assert len(names) > len(skipped), (package, names)
"""
#: After IMPORT_ALL of core: neither the checkout nor a package above core can be imported.
STANDS_ALONE = """
import importlib.metadata, importlib.util, megatron
print(*sys.path, *megatron.__path__, sep="\\n")
assert importlib.metadata.version("megatron-core").split("!")[-1] == megatron.core.__version__
apps = ("megatron.training", "megatron.inference", "megatron.hf", "megatron.cli")
above = (*apps, "tests", "tools", "experimental", "yaml")
assert not [name for name in above if importlib.util.find_spec(name)]
"""
#: A model saved and loaded into another one, with core alone.
SAVES_AND_LOADS = """
import sys, torch
from megatron.core.dist_checkpointing import (
    Solo, latest_checkpoint, load_checkpoint, optimizer_chunks, save_checkpoint, weight_chunks,
)
from megatron.core.distributed import DataParallel
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.optimizer import Optimizer
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.transformer import AttentionConfig, MLPConfig

groups = ProcessGroupCollection.single()
config = GPTConfig(
    num_layers=2, hidden_size=16, vocab_size=32,
    attention=AttentionConfig(num_attention_heads=2, num_query_groups=2, kv_channels=8),
    mlp=MLPConfig(ffn_hidden_size=32),
)
chunks = []
for seed in (1, 2):
    model = GPTModel(config, groups, seed=seed)
    optimizer = Optimizer(DataParallel(model.store, groups).owned(), groups)
    chunks.append(weight_chunks(model.store) + optimizer_chunks(optimizer))
saved, loaded = chunks
for number, chunk in enumerate(saved):
    if chunk.name.startswith("optimizer."):
        chunk.tensor.fill_(number)
same = lambda: [torch.equal(a.tensor, b.tensor) for a, b in zip(saved, loaded, strict=True)]
assert not all(same())
save_checkpoint(sys.argv[1], 3, saved, {}, coordinator=Solo())
load_checkpoint(latest_checkpoint(sys.argv[1]), loaded)
assert all(same()) and len(saved) > 20
"""


def build_wheel(project: Path, into: Path) -> Path:
    """Build one project's wheel with the installed setuptools; return its path."""
    into.mkdir()
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(into)]
    subprocess.run([*command, str(project)], check=True, capture_output=True, timeout=120)
    (wheel,) = into.glob("*.whl")
    return wheel


def declared(wheel: Path, extra: str = "") -> list[Requirement]:
    """Return the requirements in a wheel's metadata for this environment."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        lines = archive.read(name).decode().splitlines()
    requirements = [
        Requirement(x.split(":", 1)[1]) for x in lines if x.startswith("Requires-Dist:")
    ]
    return [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": extra})]


def with_their_needs(requirements: list[Requirement]) -> set[str]:
    """Return the installed distributions that the requirements need, directly or not."""
    names: set[str] = set()
    todo = list(requirements)
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in names or name.startswith("megatron-"):
            continue
        distribution = importlib.metadata.distribution(name)
        assert requirement.specifier.contains(distribution.version, prereleases=True), requirement
        names.add(name)
        for text in distribution.requires or []:
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                todo.append(need)
    return names


class CleanEnvironment:
    """A virtual environment outside the checkout, with links to declared dependencies only."""

    def __init__(self, folder: Path, dependencies: set[str]) -> None:
        self.folder = folder
        self.python = folder / "venv/bin/python"
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True
        )
        self.links = folder / "links"
        self.links.mkdir()
        for name in dependencies:
            self.link(name)
        (site,) = (folder / "venv/lib").glob("python3.*/site-packages")
        (site / "dependencies.pth").write_text(f"{self.links}\n")

    def link(self, name: str) -> None:
        """Link the top-level entries of one installed distribution."""
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or []}:
            link = self.links / top
            if top not in ("..", "__pycache__") and not top.endswith(".pth") and not link.exists():
                link.symlink_to(str(distribution.locate_file(top)))

    def install(self, wheel: Path) -> None:
        """Install one wheel by pip, without its dependencies."""
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "-q"]
        flags = ["--no-deps", "--no-index", "--disable-pip-version-check"]
        subprocess.run([*pip, *flags, str(wheel)], check=True, timeout=120)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the environment's Python, isolated from the caller's variables and folder."""
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.folder)}
        return subprocess.run(
            [str(self.python), "-I", *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build both wheels from a copy of the projects: (core, applications)."""
    folder = tmp_path_factory.mktemp("wheels")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in ("megatron_core", "megatron"):
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    core = build_wheel(folder / "source/megatron_core", folder / "core")
    return core, build_wheel(folder / "source", folder / "lm")


def names_in(wheel: Path) -> set[str]:
    """Return the files of a wheel outside its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {n for n in archive.namelist() if ".dist-info/" not in n}


def modules_of(tree: Path, root: Path) -> set[str]:
    """Return the Python files of a source tree, relative to `root`."""
    return {f.relative_to(root).as_posix() for f in tree.rglob("*.py")}


def test_wheels_contain_exactly_their_source_tree(wheels: tuple[Path, Path]) -> None:
    core, apps = (names_in(wheel) for wheel in wheels)
    project = ROOT / "megatron_core"
    data_files = {"megatron/core/py.typed", "megatron/core/ops/launches.json"}
    assert core == modules_of(project / "megatron", project) | data_files
    # The applications share the namespace megatron: each has its own py.typed (PEP 561).
    typed = {f"megatron/{name}/py.typed" for name in ("training", "inference", "hf", "cli")}
    page = "megatron/inference/server/api/chat_page.html"
    assert apps == modules_of(ROOT / "megatron", ROOT) | typed | {page}
    assert not core & apps
    assert "megatron/__init__.py" not in core | apps


def test_wheels_contain_the_full_licence(wheels: tuple[Path, Path]) -> None:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [n for n in archive.namelist() if n.endswith("/licenses/LICENSE")]
            text = archive.read(name).decode()
        assert text == (ROOT / "LICENSE").read_text(encoding="utf-8")
        # Section 4 requires a copy of the License, which has nine sections and an appendix.
        assert all(f"\n   {section}. " in text for section in range(1, 10))
        assert "END OF TERMS AND CONDITIONS" in text


def test_core_requires_only_four_packages(wheels: tuple[Path, Path]) -> None:
    assert {r.name for r in declared(wheels[0])} == {"torch", "numpy", "safetensors", "xxhash"}


def test_applications_pin_the_core_version(wheels: tuple[Path, Path]) -> None:
    (pin,) = [str(r) for r in declared(wheels[1]) if r.name == "megatron-core"]
    version = re.search(r"-(\d+!\d+(?:\.\d+)*)-py3", wheels[0].name)
    assert version is not None, wheels[0].name
    assert pin == f"megatron-core=={version[1]}"


def test_core_works_without_the_applications(wheels: tuple[Path, Path], tmp_path: Path) -> None:
    clean = CleanEnvironment(tmp_path, with_their_needs(declared(wheels[0])))
    clean.install(wheels[0])
    process = clean.run("-c", IMPORT_ALL + STANDS_ALONE, "megatron.core")
    assert process.returncode == 0, process.stderr
    assert str(ROOT) not in process.stdout, process.stdout
    process = clean.run("-c", SAVES_AND_LOADS, str(tmp_path / "saved"))
    assert process.returncode == 0, process.stderr


def test_applications_start_in_a_clean_environment(
    wheels: tuple[Path, Path], tmp_path: Path
) -> None:
    needs = with_their_needs([r for wheel in wheels for r in declared(wheel)])
    clean = CleanEnvironment(tmp_path, needs)
    for wheel in wheels:
        clean.install(wheel)
    process = clean.run(
        "-c", IMPORT_ALL, "megatron.training", "megatron.inference", "megatron.hf", "megatron.cli"
    )
    assert process.returncode == 0, process.stderr
    for command in ENTRY_POINTS:
        process = clean.run("-m", *command.split(), "--help")
        assert process.returncode == 0, process.stderr
        assert "--config" in process.stdout
