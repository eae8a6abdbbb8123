# SPDX-License-Identifier: Apache-2.0
"""The style check finds every call that could run code from data files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.style_check import check

HEAD = '# SPDX-License-Identifier: Apache-2.0\n"""One idea."""\n'
APP, TOOL = "megatron/training/planted.py", "tools/planted.py"
PLANTS = [
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
    "f = open('a', 'w')\n",
    "f = open('a')\n",
    "with path.open('a') as f:\n    f.write('x')\n",
    "f = path.open(encoding='utf-8')\n",
    "path.write_text('x')\n",
    "path.write_bytes(b'x')\n",
    "f = path.read_text(encoding='utf-8')\n",
    "f = path.read_bytes().decode()\n",
    "import io\nf = io.open('a')\n",
    "import os\nf = os.open('a', os.O_RDWR | os.O_CREAT)\n",
    "from os import open as get, O_RDWR\nf = get('a', O_RDWR)\n",
    "import os\nos.truncate('a', 0)\n",
    "import json\nf = json.load(f)\n",
    "import shutil\nshutil.copyfile('a', 'b')\n",
    "import numpy as np\nnp.save('a', 1, allow_pickle=False)\n",
    "import numpy as np\nX = np.memmap('a', mode='w+')\n",
]
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


def plant(root: Path, path: str, text: str) -> Path:
    """Write a file below `root`."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)
    return root


@pytest.mark.parametrize(("path", "text"), PLANTS)
def test_unsafe_call_is_a_breach_unless_listed(path: str, text: str, tmp_path: Path) -> None:
    plant(tmp_path, path, HEAD + text)
    assert [breach.rule for breach in check(tmp_path)] == ["unsafe"]
    listed = f'[[exception]]\nrule = "unsafe"\nwhere = "{path}"\nreason = "this is a test"\n'
    plant(tmp_path, "tools/unsafe_allowed.toml", listed)
    assert check(tmp_path) == []
    plant(tmp_path, path, HEAD)
    assert [breach.rule for breach in check(tmp_path)] == ["unused-exception"]


@pytest.mark.parametrize("text", PLAIN_FILES)
def test_plain_file_access_is_a_breach_in_installed_code(text: str, tmp_path: Path) -> None:
    for path in (APP, "megatron_core/megatron/core/planted.py"):
        plant(tmp_path, path, HEAD + text)
        assert {breach.rule for breach in check(tmp_path)} == {"plain-file"}
        (tmp_path / path).unlink()
    plant(tmp_path, TOOL, HEAD + text)  # tools are not installed
    assert check(tmp_path) == []


def test_directories_and_untrusted_files_module_are_exempt(tmp_path: Path) -> None:
    for number, text in enumerate(NO_PLAIN_FILES):
        plant(tmp_path, f"megatron/training/safe_{number}.py", HEAD + text)
    plant(tmp_path, "megatron_core/megatron/core/untrusted_files.py", HEAD + PLAIN_FILES[0])
    assert check(tmp_path) == []


def test_safe_calls_pass_and_exceptions_have_one_file(tmp_path: Path) -> None:
    for number, text in enumerate(SAFE):
        plant(tmp_path, f"tools/safe_{number}.py", HEAD + text)
    assert check(tmp_path) == []
    listed = f'[[exception]]\nrule = "unsafe"\nwhere = "{TOOL}"\nreason = "this is a test"\n'
    plant(tmp_path, "tools/budgets.toml", listed)
    with pytest.raises(ValueError, match="does not belong"):
        check(tmp_path)
