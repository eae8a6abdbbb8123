# SPDX-License-Identifier: Apache-2.0
"""Each fault of compiled code is reported for a faulty kernel or text, not for a correct one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tools.gpu_compile.code_checks import (
    buffers_of,
    overwritten_operands,
    tensor_core_instructions,
    unordered_writes,
)

PTX = """
	mov.b32 	%r1, global_smem;
	shl.b32 	%r3, %r2, 4;
	add.s32 	%r4, %r1, %r3;
	add.s32 	%r5, %r4, {offset};
$L_loop:
	wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{%r9}}, %rd1, %rd2, %p1, 1, 1, 0, 0;
	wgmma.commit_group.sync.aligned;
	wgmma.wait_group.sync.aligned {pending};
	{barrier}
	st.shared.b32 	[%r5+16], %r9;
	@%p2 bra 	$L_loop;
	ret;
"""
IR = """
    %a = ttg.local_alloc %x {allocation.offset = 4096 : i32} : (t) -> !ttg.memdesc<64x64xbf16, #s>
    %b = ttg.memdesc_trans %a {order = array<i32: 1, 0>} : m -> m
    %d = ttng.warp_group_dot %a, %b, %c : m * m -> tensor<64x64xf32, #mma>
"""
SASS = """
        /*0100*/                   HGMMA.64x64x16.F32.BF16 R24, R72, gdesc[UR8], RZ, !UPT ;
        /*0110*/                   HGMMA.64x64x16.F32.BF16 R24, R76, gdesc[UR8], R24, gsb0 ;
        /*0120*/                   {before} ;
        /*0130*/                   WARPGROUP.DEPBAR.LE gsb0, {pending} ;
        /*0140*/                   {after} ;
        /*0150*/                   EXIT ;
"""


@pytest.fixture(scope="module")
def faulty_kernels_report() -> dict:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("faulty_kernels.py"))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


def test_compiled_kernel_has_exactly_the_planted_fault(faulty_kernels_report):
    faults_by_kernel = dict(faulty_kernels_report["faults"])
    assert faults_by_kernel.pop("no fault") == {}
    assert len(faults_by_kernel) == 4
    for name, faults in faults_by_kernel.items():
        assert name in faults
        assert faults.keys() <= {name, "mma.sync of 64 rows"}, (name, faults)


def test_launch_is_compiled_and_assembled_once(faulty_kernels_report):
    uncached, cached, invalid = faulty_kernels_report["outcomes"]
    assert uncached.pop("seconds") > cached.pop("seconds")
    assert uncached == cached
    assert uncached["instructions"]["wgmma"] > 0
    registers, stack = uncached["needs"]["12.8"]
    assert registers > 16
    assert (stack, uncached["faults"]) == (0, {})
    assert set(invalid) == {"error", "seconds"}


def unordered_writes_of(*, offset=4096, pending=0, barrier=""):
    text = PTX.format(offset=offset, pending=pending, barrier=barrier)
    return unordered_writes(text, buffers=buffers_of(IR))


def test_write_after_wait_needs_barrier_where_wgmma_read():
    assert buffers_of(IR) == [[(4096, 8192), (4096, 8192)]]
    assert unordered_writes_of() == [("st.shared.b32", 4096 + 16)]
    assert unordered_writes_of(barrier="bar.sync 	0;") == []
    assert unordered_writes_of(barrier="bar.warp.sync -1;") == [("st.shared.b32", 4096 + 16)]
    assert unordered_writes_of(offset=4096 + 8192) == []
    without_buffers = unordered_writes(PTX.format(offset=0, pending=0, barrier=""))
    assert without_buffers == [("st.shared.b32", 16)]


def test_write_to_unknown_address_counts_as_fault():
    text = PTX.format(offset=0, pending=0, barrier="mov.b32 	%r5, 7;")
    assert unordered_writes(text, buffers=buffers_of(IR)) == [("st.shared.b32", None)]


@pytest.mark.parametrize(
    ("before", "pending", "after", "count"),
    [
        ("MOV R73, R9", "0x0", "NOP", 1),
        ("@P0 LDS.128 R76, [R2]", "0x0", "NOP", 1),
        ("NOP", "0x1", "IMAD.WIDE R78, R2, R3, R4", 1),
        ("NOP", "0x0", "MOV R73, R9", 0),
        ("MOV R80, R73", "0x0", "NOP", 0),
        ("STS [R72], R9", "0x0", "NOP", 0),
    ],
)
def test_write_to_registers_of_running_wgmma_is_reported(before, pending, after, count):
    text = SASS.format(before=before, pending=pending, after=after)
    assert len(overwritten_operands(text)) == count


def test_tensor_core_instructions_are_counted():
    text = PTX.format(offset=0, pending=0, barrier="mma.sync.aligned.m16n8k16.row.col.f32 ...;")
    assert tensor_core_instructions(text) == {"wgmma": 1, "tcgen05": 0, "mma.sync": 1}
