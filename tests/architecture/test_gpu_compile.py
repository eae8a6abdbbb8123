# SPDX-License-Identifier: Apache-2.0
"""The compile-only check of kernels: its launches, its fault record, its error messages."""

from __future__ import annotations

import argparse
import json
import subprocess

import pytest

pytest.importorskip("triton")


from tests.unit_tests.core.ops import kernel_budget
from tools.gpu_compile import __main__ as gpu_compile
from tools.gpu_compile import faults, toolchains
from tools.gpu_compile.compiler import PTX_VERSIONS, Outcome
from tools.gpu_compile.launch import BENCH, CANDIDATE, DESCRIBED, TEST, Launch

BUDGET = {"k 128/sm_90": {"registers": 100, "stack_bytes": 8, "shared_bytes": 1024}}


def make_launch(source=DESCRIBED, **changes) -> Launch:
    values = {"module": "m", "kernel": "k", "signature": [("x_ptr", "*bf16")], "constants": []}
    values |= {"attributes": [], "options": {"num_warps": 4}, "name": "k 128", "source": source}
    return Launch(**values | changes)


def outcome(**changes) -> Outcome:
    needs = dict.fromkeys(toolchains.ASSEMBLERS, (100, 8))
    cores = {"wgmma": 4, "tcgen05": 0, "mma.sync": 0}
    values = {"shared_bytes": 1024, "instructions": cores, "register_operands": 0, "faults": {}}
    return Outcome(**values | {"needs": needs} | changes)


def faults_of(source=DESCRIBED, budget=BUDGET, **changes) -> dict[str, int]:
    compiled = outcome(**changes)
    return faults.faults_of(make_launch(source), 90, compiled, triton="3.7.1", budget=budget)


def test_kernel_within_its_budget_has_no_fault():
    assert faults_of() == {}
    assert faults_of(needs={"12.8": (100, 8), "13.1": (112, 8)}) == {}, "a tenth more registers"
    assert faults_of(CANDIDATE, needs={"12.8": (255, 64)}) == {}


@pytest.mark.parametrize(
    ("source", "changes", "name", "count"),
    [
        (DESCRIBED, {"needs": {"12.8": (101, 8)}}, "registers by ptxas 12.8", 101),
        (DESCRIBED, {"needs": {"13.1": (113, 8)}}, "registers by ptxas 13.1", 113),
        (DESCRIBED, {"needs": {"13.0": (90, 16)}}, "stack bytes by ptxas 13.0", 16),
        (DESCRIBED, {"budget": {}}, "no budget", 1),
        (CANDIDATE, {"needs": {"12.8": (90, 0), "13.1": (90, 72)}}, "stack bytes", 72),
        (TEST, {"shared_bytes": (227 << 10) + 1}, "shared bytes", (227 << 10) + 1),
        (CANDIDATE, {"instructions": {"mma.sync": 8}}, "mma.sync", 8),
        (BENCH, {"faults": {"duplicated tile": 2}}, "duplicated tile", 2),
        (TEST, {"error": "no"}, "does not compile", 1),
    ],
)
def test_each_fault_is_named_with_its_count(source, changes, name, count):
    assert faults_of(source, **changes) == {name: count}


def test_a_described_kernel_needs_a_gpu_test():
    launches = [
        make_launch(),
        make_launch(kernel="other"),
        make_launch(TEST),
        make_launch(BENCH, kernel="b"),
    ]
    assert faults.untested(launches) == {"other in tests/gpu": {"no launch": 1}}


RECORDED = {"k 128/sm_90": {"mma.sync": 4}, "k bf16 launches/sm_90": {"stack bytes": 80}}


def test_fault_record_only_shrinks():
    increased = {"k 128/sm_90": {"mma.sync": 5, "duplicated tile": 1}}
    new, gone = faults.differences(increased, RECORDED, whole=False)
    assert [line.split(": ")[1] for line in new] == ["duplicated tile", "mma.sync"]
    assert gone == []
    with pytest.raises(ValueError, match="only shrinks"):
        faults.updated(increased, RECORDED, whole=False)
    for name in ("k", "k 128", "k 128/sm_90"):
        assert (
            faults.updated(increased, RECORDED, whole=False, raising=[name]) == RECORDED | increased
        )
    assert faults.updated(increased, RECORDED, whole=False, raising=None) == RECORDED | increased
    decreased = {"k 128/sm_90": {"mma.sync": 3}, "k bf16 launches/sm_90": {}}
    new, gone = faults.differences(decreased, RECORDED, whole=False)
    assert (new, len(gone)) == ([], 1), "a part does not have all launches of an entry"
    assert len(faults.differences(decreased, RECORDED, whole=True)[1]) == 2
    remaining = {"k bf16 launches/sm_90": {"stack bytes": 80}}
    assert faults.updated(decreased, RECORDED, whole=False) == remaining | {
        "k 128/sm_90": {"mma.sync": 3}
    }
    assert faults.updated(decreased, RECORDED, whole=True) == {"k 128/sm_90": {"mma.sync": 3}}
    assert faults.updated({}, RECORDED, whole=True) == {}


def test_every_triton_release_has_record_budget_and_ptx():
    releases = {toolchains.pinned_triton(), *toolchains.OTHER_TRITONS}
    assert faults.read_record().keys() == releases
    assert {release for release, _ in faults.BUDGET_ASSEMBLERS} == releases
    assert set(faults.BUDGET_ASSEMBLERS.values()) <= set(toolchains.ASSEMBLERS)
    assert PTX_VERSIONS.keys() == toolchains.ASSEMBLERS.keys()
    for release in releases:
        path = kernel_budget.record_path(release)
        assert faults.budget_of(release) == json.loads(path.read_text("utf-8"))["kernels"]


def test_parts_partition_the_launches():
    launches = [make_launch(name=f"k {n}", architectures=(90, 100)) for n in range(7)] * 2

    def jobs_of_part(i, n, only=""):
        return gpu_compile.jobs_of(launches, argparse.Namespace(part=(i, n), only=only))

    whole = [(x.name, sm) for x, sm in jobs_of_part(1, 1)]
    assert len(whole) == len(set(whole)) == 14
    jobs = [(x.name, sm) for i in (1, 2, 3) for x, sm in jobs_of_part(i, 3)]
    assert sorted(jobs) == sorted(whole)
    assert {x.name for x, _ in jobs_of_part(1, 1, only="k 3")} == {"k 3"}


def fake_run(code=0, stdout=""):
    def run(command, **_):
        version = stdout if command[-1] == "--version" else toolchains.pinned_triton()
        return subprocess.CompletedProcess(command, code, stdout=version, stderr="")

    return run


def test_missing_tool_error_names_the_install_command(tmp_path):
    with pytest.raises(toolchains.MissingToolError) as refused:
        toolchains.installed(tmp_path, run=fake_run(code=1))
    assert "pip install" in str(refused.value)
    assert "triton==3.6.0" in str(refused.value)
    (tmp_path / "triton-3.6.0/triton").mkdir(parents=True)
    (tmp_path / "triton-3.6.0/triton/__init__.py").touch()
    with pytest.raises(toolchains.MissingToolError, match=r"nvidia-cuda-nvcc-cu12==12\.8\.93"):
        toolchains.installed(tmp_path, run=lambda c, **o: fake_run("pip" in c)(c, **o))
    (tmp_path / "ptxas-12.8/nvidia/x/bin").mkdir(parents=True)
    with pytest.raises(toolchains.MissingToolError, match="no ptxas in"):
        toolchains.installed(tmp_path, run=fake_run())
    (tmp_path / "ptxas-12.8/nvidia/x/bin/ptxas").touch()
    with pytest.raises(toolchains.MissingToolError, match=r"not ptxas 12\.8"):
        toolchains.installed(tmp_path, run=fake_run(stdout="release 13.0, V13.0.88"))
