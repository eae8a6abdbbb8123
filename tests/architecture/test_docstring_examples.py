# SPDX-License-Identifier: Apache-2.0
"""Examples in docstrings run unchanged and print the documented output."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core import Group, ProcessGroupCollection
from megatron.core.dist_checkpointing import (
    Solo,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    weight_chunks,
)
from megatron.core.inference import Completions, Engine, EngineConfig
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.transformer import AttentionConfig, MLPConfig
from tools.code_figures import ROOT, read_modules

MODULES = read_modules(ROOT)
EXAMPLES = sorted(name for name, module in MODULES.items() if ">>> " in module.text)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
#: An indented block with one of these statements is an example and needs prompts.
STATEMENTS = (ast.Call, ast.With, ast.For, ast.While, ast.Import, ast.ImportFrom)
CONFIG = GPTConfig(
    num_layers=2,
    hidden_size=16,
    vocab_size=259,
    attention=AttentionConfig(num_attention_heads=2, num_query_groups=1, kv_channels=8),
    mlp=MLPConfig(ffn_hidden_size=24),
)
TOKENIZER = {
    "type": "byte",
    "model": None,
    "vocab_size": 257,
    "fingerprint": "byte-257",
    "eod": 256,
}


def example_names(folder: Path) -> dict[str, Any]:
    """Return the names that examples use without defining: a model, its groups, tensors, a folder.

    The folder is the working directory and holds `runs/quickstart/checkpoints`.
    """
    groups = ProcessGroupCollection.single()
    model = GPTModel(CONFIG, groups, seed=1)
    config = EngineConfig(num_blocks=8)
    extra = {
        "model": CONFIG.to_json(),
        "config": {"bf16": False, "max-position-embeddings": 64},
        "tokenizer": TOKENIZER,
    }
    checkpoints = folder / "runs/quickstart/checkpoints"
    save_checkpoint(checkpoints, 7, weight_chunks(model.store), extra, coordinator=Solo())
    return {
        "torch": torch,
        "model": model,
        "groups": groups,
        "engine": Engine(model, config),
        "Completions": Completions,
        "Engine": Engine,
        "EngineConfig": EngineConfig,
        "VOCABULARY": CONFIG.vocab_size,
        "root": folder / "example",
        "Solo": Solo,
        "save_checkpoint": save_checkpoint,
        "load_checkpoint": load_checkpoint,
        "latest_checkpoint": latest_checkpoint,
        "group": Group.single(),
        "device": torch.device("cpu"),
        "addends": torch.ones(4, 8),
        "x": torch.ones(4, 8),
        "rows": torch.tensor([3], dtype=torch.int32),
    }


@pytest.mark.parametrize("name", EXAMPLES)
def test_docstring_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    names = example_names(tmp_path) | vars(module)
    runner = doctest.DocTestRunner(verbose=False)
    report: list[str] = []
    for example in doctest.DocTestFinder().find(module, name, globs=names):
        runner.run(example, out=report.append)
    assert not runner.failures, "".join(report)
    assert runner.tries


def examples_without_prompts(tree: ast.Module) -> Iterator[str]:
    """Yield the indented blocks of docstrings that are Python code without prompts."""
    for node in ast.walk(tree):
        docstring = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
        for match in re.finditer(r"\n\n((?:    .*\n)+)", f"{docstring or ''}\n"):
            block = textwrap.dedent(match[1])
            try:
                nodes = list(ast.walk(ast.parse(block)))
            except SyntaxError:
                continue
            if any(isinstance(node, STATEMENTS) for node in nodes):
                yield block


def test_python_in_docstrings_has_prompts() -> None:
    blocks = {name: [*examples_without_prompts(m.tree)] for name, m in MODULES.items()}
    assert {name: unmarked for name, unmarked in blocks.items() if unmarked} == {}
    assert len(EXAMPLES) >= 7
    text = '"""Do it:\n\n    engine = Engine(model)\n    engine.step()\n\nOr not."""\n'
    prompts, formula = text.replace("    ", "    >>> "), '"""Sum:\n\n    O = scale (Q K) v\n"""\n'
    assert [*examples_without_prompts(ast.parse(text))] == [
        "engine = Engine(model)\nengine.step()\n"
    ]
    for fine in (prompts, formula):
        assert not [*examples_without_prompts(ast.parse(fine))]
