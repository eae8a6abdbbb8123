# SPDX-License-Identifier: Apache-2.0
"""The style check, which `make lint` runs over the tree, finds every kind of breach."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.style_check import check

ROOT = Path(__file__).resolve().parents[2]
CORE = "megatron_core/megatron/core/planted.py"
APP = "megatron/training/planted.py"
TRIAL = "experimental/trial/planted.py"
TOOL = "tools/planted.py"
HEAD = '# SPDX-License-Identifier: Apache-2.0\n"""One idea."""\n'
LONG = "def f():\n" + "    x = 1\n" * 60


def run_check(root: Path) -> tuple[int, str]:
    """Return the exit status and the output of the style check over `root`."""
    command = [sys.executable, str(ROOT / "tools/style_check.py"), "--root", str(root)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return process.returncode, process.stdout + process.stderr


def plant(root: Path, path: str, text: str) -> None:
    """Write one file below `root`; a module that begins with code gets its head."""
    if path.endswith(".py") and not text.startswith(("#", '"""')):
        text = HEAD + text
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text, encoding="utf-8")


BREACHES = [
    ("spdx", CORE, '"""One idea."""\n'),
    ("docstring", CORE, "# SPDX-License-Identifier: Apache-2.0\n"),
    ("docstring", CORE, "def public():\n    pass\n"),
    ("file-name", "megatron_core/megatron/core/comm/utils.py", HEAD),
    ("file-name", "megatron/training/helpers/planted.py", HEAD),
    ("file-lines", "tests/planted.py", "x = 1\n" * 701),
    ("function-lines", "tools/planted.py", LONG),
    ("function-lines", APP, "class A:\n    " + LONG.replace("\n", "\n    ")),
    ("parameters", "tools/planted.py", "def f(a, b, c, d, e, f, g, h, i): pass\n"),
    ("parameters", APP, "def f(a, *, b, c, d, e, f, g, h, i): pass\n"),
    ("keyword-only", APP, "def f(a, b, c=1): pass\n"),
    ("keyword-only", APP, "def f(a, b, c: bool): pass\n"),
    ("keyword-only", APP, "class A:\n    def f(self, a, b, c, d: int | None): pass\n"),
    (
        "keyword-only",
        "megatron_core/megatron/core/ops/a/__init__.py",
        "def f(a, b, c=1):\n    'Do it.'\n",
    ),
    (
        "config-fields",
        APP,
        "@dataclass(frozen=True, kw_only=True)\nclass MyConfig:\n"
        + "".join(f"    f{i}: int\n" for i in range(21)),
    ),
    ("config-frozen", APP, "@dataclass(frozen=True)\nclass MyConfig:\n    a: int\n"),
    ("config-frozen", APP, "@dataclass\nclass MyConfig:\n    a: int\n"),
    ("module-state", CORE, "CACHE: dict = {}\n"),
    ("module-state", CORE, "import collections\nCACHE = collections.defaultdict(int)\n"),
    ("module-state", CORE, "X = 1\ndef _f():\n    global X\n    X = 2\n"),
    ("attribute-guess", CORE, "def _f(a):\n    return hasattr(a, 'b')\n"),
    ("attribute-guess", CORE, "def _f(a):\n    return getattr(a, 'b', None)\n"),
    ("environment", CORE, "import os\nX = os.environ['A']\n"),
    ("environment", CORE, "from os import getenv\n"),
    ("environment", CORE, "import sys\nX = sys.argv[1]\n"),
    ("experiment-import", TRIAL, "from megatron.core.backend import LOCAL\n"),
    ("experiment-import", TRIAL, "import megatron.core.weight_gather\n"),
    ("experiment-import", TRIAL, "def f():\n    from megatron.training import step\n"),
    ("experiment-import", TRIAL, "from experimental.other.one import f\n"),
    ("experiment-import", TRIAL, "import tests.support.ranks\n"),
    ("dependency", CORE, "import yaml\n"),
    ("dependency", CORE, "def _f():\n    import triton\n"),
    ("dependency", CORE, "import megatron.training.config\n"),
    ("dependency", CORE, "from megatron import inference\n"),
    *(
        ("asserted-comparison", "tests/planted.py", f"def test_f(x, y):\n    assert {test}\n")
        for test in (
            "bool((x == 1.0).all())",
            "not (x > y).any(), 'why'",
            "torch.equal(x == 0, y)",
            "(~(x != y)).sum() < 3",
            "y and 0.1 < (x == 0).float().mean()",
            "f(x, mask=x == y)",
        )
    ),
    ("namespace", "megatron/__init__.py", HEAD),
]


@pytest.mark.parametrize(
    ("rule", "path", "text"), BREACHES, ids=[f"{i}-{b[0]}" for i, b in enumerate(BREACHES)]
)
def test_planted_breach_is_reported(tmp_path: Path, rule: str, path: str, text: str) -> None:
    plant(tmp_path, path, text)
    assert [breach.rule for breach in check(tmp_path)] == [rule]


FINE = [
    (CORE, "__all__ = ['a']\nfrom types import MappingProxyType\nX = MappingProxyType({})\n"),
    (CORE, "def f(query, key, value, *, window: int = 0):\n    'Attend.'\n"),
    (CORE, "class F(torch.autograd.Function):\n    'x'\n    def forward(ctx, a, b, c=1): 1\n"),
    (CORE, "def f(range_of, start: int, stop: int):\n    'Take three.'\n"),
    ("megatron_core/megatron/core/ops/a/triton.py", "import triton\n"),
    ("megatron_core/megatron/core/ops/a/inside.py", "def f(a, b, c=1):\n    'Do it.'\n"),
    (APP, "import os\nX = os.environ\nmodel.eval()\nnumpy.load('a', allow_pickle=False)\n"),
    (APP, 'def f():\n    """' + "text\n" * 100 + '"""\n'),
    ("tests/planted.py", "def test_f(a, b, c, d, e, f, g, h, i): pass\n"),
    *(
        ("tests/planted.py", f"def test_f(x, y):\n    same = (x == y).all()\n    assert {test}\n")
        for test in (
            "same, (x == y)",
            "float(abs(x - y).max()) < 1e-5",
            "all(a == b for a, b in zip(x, y))",
            "len([a for a in x if a == y]) == 2",
            "x.sum() == y.sum() and not same",
        )
    ),
]


@pytest.mark.parametrize(("path", "text"), FINE)
def test_allowed_code_passes(tmp_path: Path, path: str, text: str) -> None:
    plant(tmp_path, path, text)
    assert check(tmp_path) == []


def test_an_experiment_may_import_documented_names(tmp_path: Path) -> None:
    plant(tmp_path, "megatron_core/megatron/core/comm/__init__.py", '__all__ = ["trace"]\n')
    row = "| `megatron.training.hooks` | `TrainingHooks`, `More` |\n"
    plant(tmp_path, "experimental/README.md", f"# Experiments\n\n{row}")
    lines = ("from megatron.core.comm import trace", "from experimental.trial.own import f")
    lines += ("from megatron.training.hooks import More, TrainingHooks", "import torch")
    plant(tmp_path, TRIAL, "\n".join(lines) + "\n")
    plant(tmp_path, "experimental/trial/tests/test_it.py", "import tests.support.ranks\n")
    assert check(tmp_path) == []
    plant(tmp_path, TRIAL, "from megatron.core.comm import other\n")
    assert [breach.rule for breach in check(tmp_path)] == ["experiment-import"]


def exception(rule: str, where: str, **fields: object) -> str:
    """Return one entry of budgets.toml."""
    lines = [f'rule = "{rule}"', f'where = "{where}"']
    lines += [f"{key} = {value!r}" for key, value in fields.items()]
    return "[[exception]]\n" + "\n".join(lines) + "\n"


def test_exception_has_a_limit_and_must_be_needed(tmp_path: Path) -> None:
    reason = "it reads better whole"
    where = "tools/planted.py::f"
    plant(tmp_path, "tools/planted.py", LONG)  # 61 lines
    for limit, status in ((61, 0), (60, 1), (101, 1)):
        text = exception("function-lines", where, limit=limit, reason=reason)
        plant(tmp_path, "tools/budgets.toml", text)
        assert run_check(tmp_path)[0] == status
    assert "hard" in run_check(tmp_path)[1]

    plant(tmp_path, "tools/budgets.toml", exception("function-lines", where, limit=70, reason="no"))
    assert "reason" in run_check(tmp_path)[1]

    entry = exception("function-lines", where, limit=70, reason=reason)
    plant(tmp_path, "tools/budgets.toml", entry)
    plant(tmp_path, "tools/planted.py", HEAD)
    status, output = run_check(tmp_path)
    assert status == 1
    assert "not needed" in output


#: Calls that could run code from data files.
UNSAFE = [
    (APP, "import pickle\n"),
    (TOOL, "from pickle import loads\n"),
    (TOOL, "def f():\n    import _pickle as json\n"),
    (TOOL, "import torch\nX = torch.load('a')\n"),
    (TOOL, "import torch as t\nX = t.load('a', weights_only=False)\n"),
    (APP, "import torch\nX = torch.load('a', weights_only=True)\n"),
    (TOOL, "from torch import load as get\nX = get('a')\n"),
    (TOOL, "X = eval('1')\n"),
    (TOOL, "exec('1')\n"),
    (TOOL, "import builtins\nbuiltins.eval('1')\n"),
    (TOOL, "import yaml\nX = yaml.load('a', Loader=yaml.Loader)\n"),
    (TOOL, "from yaml import unsafe_load\nX = unsafe_load('a')\n"),
    (TOOL, "import subprocess\nsubprocess.run('a', shell=True)\n"),
    (TOOL, "import subprocess as s\ns.getoutput('a')\n"),
    (TOOL, "import os\nos.system('a')\n"),
    (TOOL, "from os import popen\npopen('a')\n"),
    (TOOL, "f = lambda g, on: g(trust_remote_code=on)\n"),
    (TOOL, "f = lambda g: g(trust_remote_code=True)\n"),
    (TOOL, "import numpy as np\nX = np.load('a', allow_pickle=True)\n"),
    (TOOL, "import numpy as np\nX = np.load('a')\n"),
    (APP, "import tarfile\n"),
    (APP, "import zipfile\n"),
    (TOOL, "import shutil\nshutil.unpack_archive('a')\n"),
    (TOOL, "import torch.distributed as dist\ndist.broadcast_object_list([])\n"),
]
PLAIN_FILES = [
    "f = open('a', 'w')\n", "f = open('a')\n", "with path.open('a') as f:\n    f.write('x')\n",
    "f = path.open(encoding='utf-8')\n", "path.write_text('x')\n", "path.write_bytes(b'x')\n",
    "f = path.read_text(encoding='utf-8')\n", "f = path.read_bytes().decode()\n",
    "import io\nf = io.open('a')\n", "import os\nf = os.open('a', os.O_RDWR | os.O_CREAT)\n",
    "from os import open as get, O_RDWR\nf = get('a', O_RDWR)\n",
    "import os\nos.truncate('a', 0)\n", "import json\nf = json.load(f)\n",
    "import shutil\nshutil.copyfile('a', 'b')\n",
    "import numpy as np\nnp.save('a', 1, allow_pickle=False)\n",
    "import numpy as np\nX = np.memmap('a', mode='w+')\n",
]  # fmt: skip
NO_PLAIN_FILES = [
    "import os\nf = os.open('a', os.O_RDONLY | os.O_DIRECTORY)\nmodel.open()\ndoor.open('wide')\n",
    "import numpy as np\nX = np.memmap('a', mode='r')\nfile.read_bytes(X, 3)\n",
    "from megatron.core.untrusted_files import read_text\nX = read_text('a', 9)\n",
]
SAFE = [
    "import torch\nX = torch.load('a', weights_only=True)\n",
    "import numpy as np\nX = np.load('a', allow_pickle=False)\n",
    "import yaml\nX = yaml.safe_load('a')\n",
    "import subprocess\nsubprocess.run(['a'], shell=False)\nmodel.eval()\n",
]


@pytest.mark.parametrize(("path", "text"), UNSAFE)
def test_unsafe_call_is_a_breach_unless_listed(path: str, text: str, tmp_path: Path) -> None:
    plant(tmp_path, path, text)
    assert [breach.rule for breach in check(tmp_path)] == ["unsafe"]
    listed = f'[[exception]]\nrule = "unsafe"\nwhere = "{path}"\nreason = "this is a test"\n'
    plant(tmp_path, "tools/unsafe_allowed.toml", listed)
    assert check(tmp_path) == []
    plant(tmp_path, path, HEAD)
    assert [breach.rule for breach in check(tmp_path)] == ["unused-exception"]


@pytest.mark.parametrize("text", PLAIN_FILES)
def test_plain_file_access_is_a_breach_in_installed_code(text: str, tmp_path: Path) -> None:
    for path in (APP, "megatron_core/megatron/core/planted.py"):
        plant(tmp_path, path, text)
        assert {breach.rule for breach in check(tmp_path)} == {"plain-file"}
        (tmp_path / path).unlink()
    plant(tmp_path, TOOL, text)  # tools are not installed
    assert check(tmp_path) == []


def test_directories_and_untrusted_files_module_are_exempt(tmp_path: Path) -> None:
    for number, text in enumerate(NO_PLAIN_FILES):
        plant(tmp_path, f"megatron/training/safe_{number}.py", text)
    plant(tmp_path, "megatron_core/megatron/core/untrusted_files.py", PLAIN_FILES[0])
    assert check(tmp_path) == []


def test_safe_calls_pass_and_exceptions_have_one_file(tmp_path: Path) -> None:
    for number, text in enumerate(SAFE):
        plant(tmp_path, f"tools/safe_{number}.py", text)
    assert check(tmp_path) == []
    listed = f'[[exception]]\nrule = "unsafe"\nwhere = "{TOOL}"\nreason = "this is a test"\n'
    plant(tmp_path, "tools/budgets.toml", listed)
    with pytest.raises(ValueError, match="does not belong"):
        check(tmp_path)
