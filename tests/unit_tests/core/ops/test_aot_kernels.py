# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled for sm_90 and sm_100 without a GPU match their recorded budgets."""

import ast
import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

import megatron.core.ops as ops
from tests.unit_tests.core.ops import kernel_budget
from tests.unit_tests.core.ops.kernel_budget import (
    RECORD,
    SHARED_BYTES,
    compiled,
    merged,
    problems,
    record_path,
)
from tools.gpu_compile import faults

MAX_COMPILATIONS = 30


def jit_functions(folder: Path) -> tuple[set[str], set[str]]:
    """Return the names of all @triton.jit functions, and the subset that other kernels call."""
    functions = [
        node
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]
    called = {
        node.func.id
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    names = {function.name for function in functions}
    return names, names & called


def assert_matches_record(report: dict) -> None:
    """Fail if the compiled kernels differ from their record."""
    path = record_path(report["triton"])
    record = json.loads((path if path.exists() else RECORD).read_text("utf-8"))
    same_release = record["triton"] == report["triton"]
    errors = problems(report["kernels"], record["kernels"], same_release=same_release)
    recorded_faults = faults.read_record()[report["triton"]]
    new_faults, _ = faults.differences(report["faults"], recorded_faults, whole=False)
    assert not errors + new_faults, "\n".join(errors + new_faults)


@pytest.mark.parametrize(
    "record", sorted(RECORD.parent.glob(f"{RECORD.stem}*.json")), ids=lambda path: path.stem
)
def test_fp32_recurrences_spill_at_most_256_bytes(record):
    kernels = json.loads(record.read_text("utf-8"))["kernels"]
    stacks = {
        f"{kernel} {kind}": kernels[f"{kernel} {kind} fp32/sm_90"]["stack_bytes"]
        for kernel in ("sweep_kernel", "reverse_sweep_kernel", "recurrence_gradients_kernel")
        for kind in ("delta", "ssd")
    }
    assert {name: stack for name, stack in stacks.items() if stack > 256} == {}


@pytest.mark.background("aot", compiled)
def test_heaviest_aot_kernels_match_their_record(background):
    """Compile the heaviest kernels; the nightly test compiles all for all architectures."""
    report = background.result("aot")
    assert_matches_record(report)
    assert 0 < len(report["kernels"]) <= MAX_COMPILATIONS
    assert {name.split("/sm_")[1] for name in report["kernels"]} == {"90", "100"}


@pytest.mark.background("aot", compiled)
def test_every_kernel_is_described_and_recorded(background):
    described = background.result("aot")["described"]
    names, called = jit_functions(Path(ops.__path__[0]))
    assert len(names) > 30
    assert {name.split("/")[0].split(" ")[0] for name in described} == names - called, (
        "each kernel is described in aot/"
    )
    for path in RECORD.parent.glob("kernel_budget*.json"):
        recorded = json.loads(path.read_text("utf-8"))
        assert recorded["kernels"].keys() == set(described), f"run kernel_budget.py: {path.name}"
        assert record_path(recorded["triton"]) == path


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_aot_kernels_match_record_on_all_architectures():
    report = compiled("--all")
    assert_matches_record(report)
    assert list(report["kernels"]) == report["described"]


def needs(registers=100, stack=0, shared=4096):
    return {"k/sm_90": {"registers": registers, "stack_bytes": stack, "shared_bytes": shared}}


def test_unknown_part_is_refused_with_known_parts(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["kernel_budget.py", "--only", "nosuch"])
    with pytest.raises(SystemExit) as stopped:
        kernel_budget.main()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "named 'nosuch'" in line
    assert " prologue " in line


def test_record_is_exact_for_its_triton_release():
    assert problems(needs(), needs(), same_release=True) == []
    assert problems(needs(registers=97), needs(), same_release=True) == []
    for used in (needs(registers=101), needs(stack=8), needs(shared=4097)):
        (message,) = problems(used, needs(), same_release=True)
        assert "more than" in message
    for used in (needs(registers=90), needs(shared=64)):
        (message,) = problems(used, needs(), same_release=True)
        assert "less than" in message
    assert "less than" in problems(needs(), needs(stack=8), same_release=True)[0]
    assert "no record" in problems(needs(), {}, same_release=True)[0]


def test_kernel_compiled_to_nothing_is_reported():
    (message,) = problems(needs(registers=4), needs(registers=4), same_release=True)
    assert "nothing was compiled" in message


def test_other_triton_release_may_differ_but_not_spill():
    assert problems(needs(registers=110, shared=8192), needs(), same_release=False) == []
    assert problems(needs(stack=16), needs(stack=8), same_release=False) == []
    assert problems(needs(stack=8), needs(), same_release=False)
    assert problems(needs(registers=120), needs(), same_release=False)
    too_large = needs(shared=SHARED_BYTES + 1)
    assert problems(too_large, too_large, same_release=False)


def test_record_only_shrinks_unless_kernel_is_named():
    names = ["k/sm_90"]
    assert merged(needs(registers=90), needs(), described=names) == needs(registers=90)
    assert merged(needs(), {}, described=names) == needs()
    assert merged({}, needs(), described=[]) == {}
    with pytest.raises(ValueError, match="only shrinks"):
        merged(needs(registers=90, stack=8), needs(), described=names, raising=["other"])
    for name in ("k", "k/sm_90"):
        assert merged(needs(stack=8), needs(), described=names, raising=[name]) == needs(stack=8)
