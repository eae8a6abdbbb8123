# SPDX-License-Identifier: Apache-2.0
"""The compile-only lane: what it compiles, what it compares with its record, how it fails."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest

pytest.importorskip("triton")

import triton.language as tl

from tests.unit_tests.core.ops import kernel_budget
from tools.gpu_compile import __main__ as lane
from tools.gpu_compile import faults, launch, toolchains
from tools.gpu_compile.compiler import PTX_VERSIONS, Outcome
from tools.gpu_compile.launch import BENCH, CANDIDATE, DESCRIBED, TEST, Launch

BUDGET = {"k 128/sm_90": {"registers": 100, "stack_bytes": 8, "shared_bytes": 1024}}


def a_launch(source=DESCRIBED, **changes) -> Launch:
    values = {"module": "m", "kernel": "k", "signature": [("x_ptr", "*bf16")], "constants": []}
    values |= {"attributes": [], "options": {"num_warps": 4}, "name": "k 128", "source": source}
    return Launch(**values | changes)


def outcome(**changes) -> Outcome:
    needs = dict.fromkeys(toolchains.ASSEMBLERS, (100, 8))
    cores = {"wgmma": 4, "tcgen05": 0, "mma.sync": 0}
    values = {"shared_bytes": 1024, "instructions": cores, "register_operands": 0, "faults": {}}
    return Outcome(**values | {"needs": needs} | changes)


def faults_of(source=DESCRIBED, budget=BUDGET, **changes) -> dict[str, int]:
    each = outcome(**changes)
    return faults.faults_of(a_launch(source), 90, each, triton="3.7.1", budget=budget)


def test_a_kernel_within_its_budget_has_no_fault():
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


def test_launches_of_tests_share_an_entry():
    names = [launch.named([a_launch(TEST, name="")] * 2)[n].name for n in (0, 1)]
    assert names == ["k bf16 #1", "k bf16 #2"]
    assert faults.entry_of(a_launch(TEST, name="k bf16 #2"), 100) == "k bf16 launches/sm_100"
    narrow = a_launch(TEST, signature=[("x_ptr", "*fp32")])
    assert faults.entry_of(narrow, 90) == "k fp32 launches/sm_90"
    assert faults.entry_of(a_launch(), 90) in BUDGET


def test_a_described_kernel_needs_a_gpu_test():
    launches = [a_launch(), a_launch(kernel="other"), a_launch(TEST), a_launch(BENCH, kernel="b")]
    assert faults.untested(launches) == {"other in tests/gpu": {"no launch": 1}}


KNOWN = {"k 128/sm_90": {"mma.sync": 4}, "k bf16 launches/sm_90": {"stack bytes": 80}}


def test_the_record_only_shrinks():
    more = {"k 128/sm_90": {"mma.sync": 5, "duplicated tile": 1}}
    new, gone = faults.differences(more, KNOWN, whole=False)
    assert [line.split(": ")[1] for line in new] == ["duplicated tile", "mma.sync"]
    assert gone == []
    with pytest.raises(ValueError, match="only shrinks"):
        faults.updated(more, KNOWN, whole=False)
    for name in ("k", "k 128", "k 128/sm_90"):
        assert faults.updated(more, KNOWN, whole=False, raising=[name]) == KNOWN | more
    assert faults.updated(more, KNOWN, whole=False, raising=None) == KNOWN | more
    fewer = {"k 128/sm_90": {"mma.sync": 3}, "k bf16 launches/sm_90": {}}
    new, gone = faults.differences(fewer, KNOWN, whole=False)
    assert (new, len(gone)) == ([], 1), "a part has not all launches of an entry"
    assert len(faults.differences(fewer, KNOWN, whole=True)[1]) == 2
    kept = {"k bf16 launches/sm_90": {"stack bytes": 80}}
    assert faults.updated(fewer, KNOWN, whole=False) == kept | {"k 128/sm_90": {"mma.sync": 3}}
    assert faults.updated(fewer, KNOWN, whole=True) == {"k 128/sm_90": {"mma.sync": 3}}
    assert faults.updated({}, KNOWN, whole=True) == {}


def test_the_record_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "record.json"
    faults.write_record({"3.7.1": KNOWN, "3.6.0": {}}, path)
    assert faults.read_record(path) == {"3.6.0": {}, "3.7.1": KNOWN}


def test_every_release_has_a_record_a_budget_and_a_ptx_version():
    releases = {toolchains.pinned_triton(), *toolchains.OTHER_TRITONS}
    assert faults.read_record().keys() == releases
    assert {release for release, _ in faults.BUDGET_ASSEMBLERS} == releases
    assert set(faults.BUDGET_ASSEMBLERS.values()) <= set(toolchains.ASSEMBLERS)
    assert PTX_VERSIONS.keys() == toolchains.ASSEMBLERS.keys()
    for release in releases:
        path = kernel_budget.record_path(release)
        assert faults.budget_of(release) == json.loads(path.read_text("utf-8"))["kernels"]


def test_parts_are_a_partition():
    launches = [a_launch(name=f"k {n}", architectures=(90, 100)) for n in range(7)] * 2

    def part(i, n, only=""):
        return lane.jobs_of(launches, argparse.Namespace(part=(i, n), only=only))

    whole = [(x.name, sm) for x, sm in part(1, 1)]
    assert len(whole) == len(set(whole)) == 14
    parts = [(x.name, sm) for i in (1, 2, 3) for x, sm in part(i, 3)]
    assert sorted(parts) == sorted(whole)
    assert {x.name for x, _ in part(1, 1, only="k 3")} == {"k 3"}


def test_a_launch_survives_its_file(tmp_path):
    constants = [([1], launch.encoded(tl.bfloat16)), ([2], launch.encoded((1, None, True)))]
    each = a_launch(constants=constants, attributes=[([0], [["tt.divisibility", 16]])])
    launch.write(tmp_path / "launches", [each, each])
    (found,) = launch.read(tmp_path / "launches")
    values = [launch.decoded(value) for _, value in found.constants]
    assert values == [tl.bfloat16, (1, None, True)]
    assert (found.name, found.dtype, dict(found.options)) == ("k 128", "bf16", {"num_warps": 4})


def test_a_launch_knows_the_candidate_that_it_was_started_with():
    signature = [("x_ptr", "*bf16"), ("BLOCK", "constexpr")]
    each = a_launch(signature=signature, constants=[([1], 64)])
    assert each.started_with({"BLOCK": 64, "num_warps": 4})
    assert not each.started_with({"BLOCK": 32, "num_warps": 4})
    assert not each.started_with({"BLOCK": 64, "num_warps": 8})
    assert not each.started_with({"ROWS": 64})


def answers(code=0, stdout=""):
    def run(command, **_):
        version = stdout if command[-1] == "--version" else toolchains.pinned_triton()
        return subprocess.CompletedProcess(command, code, stdout=version, stderr="")

    return run


def test_what_cannot_be_installed_is_one_line_with_the_command(tmp_path):
    with pytest.raises(toolchains.MissingToolError) as refused:
        toolchains.installed(tmp_path, run=answers(code=1))
    assert "pip install" in str(refused.value)
    assert "triton==3.6.0" in str(refused.value)
    (tmp_path / "triton-3.6.0/triton").mkdir(parents=True)
    (tmp_path / "triton-3.6.0/triton/__init__.py").touch()
    with pytest.raises(toolchains.MissingToolError, match=r"nvidia-cuda-nvcc-cu12==12\.8\.93"):
        toolchains.installed(tmp_path, run=lambda c, **o: answers("pip" in c)(c, **o))
    (tmp_path / "ptxas-12.8/nvidia/x/bin").mkdir(parents=True)
    with pytest.raises(toolchains.MissingToolError, match="no ptxas in"):
        toolchains.installed(tmp_path, run=answers())
    (tmp_path / "ptxas-12.8/nvidia/x/bin/ptxas").touch()
    with pytest.raises(toolchains.MissingToolError, match=r"not ptxas 12\.8"):
        toolchains.installed(tmp_path, run=answers(stdout="release 13.0, V13.0.88"))


def test_missing_triton_release_exits_with_code_2(monkeypatch, capsys):
    def missing(_):
        raise toolchains.MissingToolError("no ptxas: do this")

    monkeypatch.setattr(toolchains, "installed", missing)
    monkeypatch.setattr(sys, "argv", ["gpu_compile"])
    assert lane.main() == 2
    assert capsys.readouterr().err.splitlines() == ["gpu-compile: error: no ptxas: do this"]


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "a/b"])
def test_a_part_is_i_of_n(part, capsys):
    with pytest.raises(SystemExit):
        lane.command_line().parse_args(["--part", part])
    assert part in capsys.readouterr().err
    assert lane.command_line().parse_args(["--part", "2/3"]).part == (2, 3)


@pytest.mark.parametrize("words", [["--raise", "a kernel"], ["--raise-all"]])
def test_options_of_the_record_need_record(monkeypatch, capsys, words):
    """Without it everything was compiled, and nothing was raised."""
    monkeypatch.setattr(sys, "argv", ["gpu_compile", *words])
    with pytest.raises(SystemExit):
        lane.main()
    assert "add --record" in capsys.readouterr().err
