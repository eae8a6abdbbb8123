# SPDX-License-Identifier: Apache-2.0
"""All-gather and reduce-scatter over symmetric memory in Triton, two transports for each.

| transport | all-gather | reduce-scatter |
|---|---|---|
| multimem | a store to the multicast address: the switch copies it | a load: the switch sums |
| p2p | a store to each rank's buffer | a load from each rank's buffer, summed in fp32 |

A third kernel has both in one, for what stands between two blocks: reduce-scatter the addends, add
the sum to the residual stream, normalise by RMSNorm, all-gather.

The variants for ranks with unlike numbers of rows (all-gather-v, reduce-scatter-v) read these
numbers on the device, so the host does not know them, and a CUDA graph replays with others. The
grid, the barriers and the shapes follow the most rows that a rank may have; rows that are none are
zeros in the result. The package says which rows go where.

A kernel takes addresses, no tensors of other ranks: a table int64 [world] of the ranks' buffers and
one of their signal pads. All of them move packs of 16 bytes: multimem through PTX that the
interpreter cannot run (PTX ISA, `multimem`), p2p in plain Triton.

The barrier: program b of rank r owns slot [b, s] of its pad for every source s. It sets its slot on
every rank from 0 to 1, then its own slots from 1 to 0, so pads are 0 after every kernel, and a
kernel in a CUDA graph can be replayed. A slot is set only after it was taken, hence all programs of
a kernel must be resident at once, and a pad holds `programs` x `world` slots of 4 bytes.

- all-gather ends with a barrier: what was stored before (release) is seen after it (acquire);
- reduce-scatter begins with one: the peers' products are complete. It has none at its end: whoever
  writes the same buffer next has passed another barrier first (two buffers in turns);
- the fused kernel has both, each program for the rows of the same number on all ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron.core.ops.launches import Launches
from megatron.core.ops.nvls import PACK_BYTES, Peers, RowNorm

#: Packs that a program moves at a time: one a thread.
COPY = Launches("nvls_copy", {"PACKS": 512, "num_warps": 16})
#: Elements of a row that a warp holds in the fused kernels, 16 a thread.
ROW_PER_WARP = 512


@triton.jit
def _exchanged(slots, live, OLD: tl.constexpr, SEM: tl.constexpr, LIMIT: tl.constexpr):
    """Turn slots from OLD to 1 - OLD, each once; return which could not be, of those alive."""
    waits, tries = live, 0
    while (tl.sum(waits.to(tl.int32)) > 0) & ((LIMIT == 0) | (tries < LIMIT)):
        # A slot that is done, or that is none, expects 2, which no slot ever holds.
        expected = tl.where(waits, OLD, 2)
        seen = tl.atomic_cas(slots, expected, tl.full(slots.shape, 1 - OLD, tl.int32), SEM, "sys")
        waits = waits & (seen != OLD)
        tries += 1
    return waits


@triton.jit
def _trap():
    """Stop the device, once all it has stored can be seen by the host."""
    zero = tl.program_id(0) * 0
    zero = tl.inline_asm_elementwise(
        "fence.acq_rel.sys; mov.u32 $0, $1;", "=r,r", [zero], tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()  # the thread that has stored is past its fence
    tl.inline_asm_elementwise(
        "trap; mov.u32 $0, $1;", "=r,r", [zero], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _barrier(
    pads_ptr, status_ptr, rank, WORLD: tl.constexpr, LIMIT: tl.constexpr, TRAP: tl.constexpr
):
    """Wait for the same program of all ranks: one thread for each of them.

    With LIMIT > 0 slots are tried so often at most; then 1 + a missing peer's rank is written to
    the status, and the program goes on, with void results, or with TRAP stops the device.
    """
    SLOTS: tl.constexpr = triton.next_power_of_2(WORLD)
    peer = tl.arange(0, SLOTS)
    live = peer < WORLD
    place = tl.minimum(peer, WORLD - 1)
    own = tl.program_id(0) * WORLD
    there = tl.load(pads_ptr + place).to(tl.pointer_type(tl.int32)) + own + rank
    here = tl.load(pads_ptr + rank).to(tl.pointer_type(tl.int32)) + own + place
    tl.debug_barrier()  # the whole program has done its loads and stores
    late = _exchanged(there, live, 0, "release", LIMIT)
    late |= _exchanged(here, live, 1, "acquire", LIMIT)
    tl.debug_barrier()  # nothing of the program is loaded before
    if LIMIT > 0:
        missing = tl.max(tl.where(late, 1 + peer, 0))
        if missing > 0:
            tl.store(status_ptr, missing)
            if TRAP:
                _trap()


@triton.jit
def _peer(buffers_ptr, peer, dtype: tl.constexpr):
    """Return a rank's buffer, which is known to begin at a pack."""
    return tl.multiple_of(tl.load(buffers_ptr + peer).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _peer_sum(buffers_ptr, at, mask, dtype: tl.constexpr, WORLD: tl.constexpr):
    """Return the sum over ranks of what their buffers hold, fp32."""
    total = tl.zeros(at.shape, tl.float32)
    for peer in range(WORLD):
        there = _peer(buffers_ptr, peer, dtype) + at
        # Volatile: no load of shared memory may move over the barrier.
        total += tl.load(there, mask=mask, other=0.0, volatile=True).to(tl.float32)
    return total


@triton.jit
def _own_part(rows_ptr, row_packs, packs, rank, WORLD: tl.constexpr):
    """Return the packs of this rank's rows, the packs of the ranks before it, and those of all.

    A rank has no more than `packs`, whatever its number of rows says.
    """
    peer = tl.arange(0, triton.next_power_of_2(WORLD))
    counts = tl.load(rows_ptr + peer, mask=peer < WORLD, other=0)
    counts = tl.minimum(tl.maximum(counts, 0) * row_packs, packs)
    own = tl.sum(tl.where(peer == rank, counts, 0))
    return own, tl.sum(tl.where(peer < rank, counts, 0)), tl.sum(counts)


@triton.jit
def _clear(out_ptr, first, end, PACKS: tl.constexpr):
    """Store zeros in packs `first` to `end` - 1."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    WIDTH: tl.constexpr = 128 // dtype.primitive_bitwidth
    for start in range(first + tl.program_id(0) * PACKS, end, tl.num_programs(0) * PACKS):
        at = start * WIDTH + tl.arange(0, PACKS * WIDTH)
        tl.store(out_ptr + at, tl.zeros(at.shape, dtype), mask=at < end * WIDTH)


@triton.jit
def _store_to_peers(x_ptr, buffers_ptr, packs, first, WORLD: tl.constexpr, PACKS: tl.constexpr):
    """Store the packs of x from pack `first` on in every rank's buffer."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    WIDTH: tl.constexpr = 128 // dtype.primitive_bitwidth  # elements of a pack
    for start in range(tl.program_id(0) * PACKS, packs, tl.num_programs(0) * PACKS):
        at = start * WIDTH + tl.arange(0, PACKS * WIDTH)
        mask = at < packs * WIDTH
        x = tl.load(x_ptr + at, mask=mask)
        for peer in range(WORLD):
            tl.store(_peer(buffers_ptr, peer, dtype) + (first * WIDTH + at), x, mask=mask)


@triton.jit
def _sum_of_peers(
    buffers_ptr, out_ptr, packs, first, own, WORLD: tl.constexpr, PACKS: tl.constexpr
):
    """Sum the ranks' buffers from pack `first` on into the packs of out; zeros from `own` on."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    WIDTH: tl.constexpr = 128 // dtype.primitive_bitwidth
    for start in range(tl.program_id(0) * PACKS, packs, tl.num_programs(0) * PACKS):
        at = start * WIDTH + tl.arange(0, PACKS * WIDTH)
        total = _peer_sum(buffers_ptr, first * WIDTH + at, at < own * WIDTH, dtype, WORLD)
        tl.store(out_ptr + at, total.to(dtype), mask=at < packs * WIDTH)


@triton.jit(do_not_specialize=["first", "rank"])
def peer_all_gather_kernel(
    x_ptr,
    buffers_ptr,
    pads_ptr,
    status_ptr,
    packs,
    first,
    rank,
    WORLD: tl.constexpr,
    PACKS: tl.constexpr,
    LIMIT: tl.constexpr,
    TRAP: tl.constexpr,
):
    """Store the packs of x from pack `first` on in every rank's buffer."""
    _store_to_peers(x_ptr, buffers_ptr, packs, first, WORLD, PACKS)
    _barrier(pads_ptr, status_ptr, rank, WORLD, LIMIT, TRAP)


@triton.jit(do_not_specialize=["rank"])
def peer_all_gather_v_kernel(
    x_ptr,
    rows_ptr,
    buffers_ptr,
    out_ptr,
    pads_ptr,
    status_ptr,
    packs,
    row_packs,
    rank,
    WORLD: tl.constexpr,
    PACKS: tl.constexpr,
    LIMIT: tl.constexpr,
    TRAP: tl.constexpr,
):
    """Store this rank's rows after those of the ranks before it in every rank's buffer, and zeros
    after all of them in out, this rank's own."""
    own, first, total = _own_part(rows_ptr, row_packs, packs, rank, WORLD)
    _store_to_peers(x_ptr, buffers_ptr, own, first, WORLD, PACKS)
    _clear(out_ptr, total, packs * WORLD, PACKS)
    _barrier(pads_ptr, status_ptr, rank, WORLD, LIMIT, TRAP)


@triton.jit(do_not_specialize=["first", "rank"])
def peer_reduce_scatter_kernel(
    buffers_ptr,
    out_ptr,
    pads_ptr,
    status_ptr,
    packs,
    first,
    rank,
    WORLD: tl.constexpr,
    PACKS: tl.constexpr,
    LIMIT: tl.constexpr,
    TRAP: tl.constexpr,
):
    """Sum the ranks' buffers from pack `first` on into the packs of out."""
    _barrier(pads_ptr, status_ptr, rank, WORLD, LIMIT, TRAP)
    _sum_of_peers(buffers_ptr, out_ptr, packs, first, packs, WORLD, PACKS)


@triton.jit(do_not_specialize=["rank"])
def peer_reduce_scatter_v_kernel(
    buffers_ptr,
    rows_ptr,
    out_ptr,
    pads_ptr,
    status_ptr,
    packs,
    row_packs,
    rank,
    WORLD: tl.constexpr,
    PACKS: tl.constexpr,
    LIMIT: tl.constexpr,
    TRAP: tl.constexpr,
):
    """Sum this rank's rows, which stand after those of the ranks before it, into out; the rest of
    out is zeros."""
    _barrier(pads_ptr, status_ptr, rank, WORLD, LIMIT, TRAP)
    own, first, _ = _own_part(rows_ptr, row_packs, packs, rank, WORLD)
    _sum_of_peers(buffers_ptr, out_ptr, packs, first, own, WORLD, PACKS)


@triton.jit(do_not_specialize=["first", "rank"])
def peer_reduce_norm_gather_kernel(
    buffers_ptr,
    gathered_ptr,
    stream_ptr,
    weight_ptr,
    pads_ptr,
    status_ptr,
    rows,
    row_packs,
    eps,
    offset,
    first,
    rank,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    LIMIT: tl.constexpr,
    TRAP: tl.constexpr,
):
    """Reduce-scatter rows, add them to the stream [rows, h] in place, normalise by RMSNorm and
    store the result from pack `first` on in every rank's gathered buffer.

    A program has one row at a time, in one block. Two buffers: one that is read, one that is
    written.
    """
    _barrier(pads_ptr, status_ptr, rank, WORLD, LIMIT, TRAP)
    dtype: tl.constexpr = stream_ptr.dtype.element_ty
    WIDTH: tl.constexpr = 128 // dtype.primitive_bitwidth
    features = row_packs * WIDTH
    at = tl.arange(0, BLOCK)
    mask = at < features
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32) + offset
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        stream = stream_ptr + row * features + at
        there = (first + row * row_packs) * WIDTH + at
        total = _peer_sum(buffers_ptr, there, mask, dtype, WORLD)
        total += tl.load(stream, mask=mask, other=0.0).to(tl.float32)
        rounded = total.to(dtype)
        tl.store(stream, rounded, mask=mask)
        total = rounded.to(tl.float32)  # normalise what the next block adds to
        scale = tl.rsqrt(tl.sum(total * total) / features + eps)
        normed = (total * scale * weight).to(dtype)
        for peer in range(WORLD):
            tl.store(_peer(gathered_ptr, peer, dtype) + there, normed, mask=mask)
    _barrier(pads_ptr, status_ptr, rank, WORLD, LIMIT, TRAP)


@triton.jit
def _multimem_load(address, mask, IS_BF16: tl.constexpr):
    """Return the sum over ranks of the packs of 16 bytes at multicast addresses, 4 x uint32."""
    if IS_BF16:
        return tl.inline_asm_elementwise(
            """
            {
                .reg .pred %p0;
                setp.ne.s32 %p0, $5, 0;
                mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
                @%p0 multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2
                    {$0, $1, $2, $3}, [$4];
            }
            """,
            "=r,=r,=r,=r,l,r",
            args=[address, mask.to(tl.int32)],
            dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            is_pure=False,
            pack=1,
        )
    return tl.inline_asm_elementwise(
        """
        {
            .reg .pred %p0;
            setp.ne.s32 %p0, $5, 0;
            mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
            @%p0 multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {$0, $1, $2, $3}, [$4];
        }
        """,
        "=r,=r,=r,=r,l,r",
        args=[address, mask.to(tl.int32)],
        dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def _multimem_store(address, a, b, c, d, mask):
    """Store packs of 16 bytes to all ranks."""
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred %p0;
            setp.ne.s32 %p0, $6, 0;
            @%p0 multimem.st.relaxed.sys.global.v4.f32 [$1], {$2, $3, $4, $5};
            mov.u32 $0, 0;
        }
        """,
        "=r,l,r,r,r,r,r",
        args=[address, a, b, c, d, mask.to(tl.int32)],
        dtype=tl.uint32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _joined(a, b, c, d):
    """Return words [4 n] in the order of memory from the four [n] of packs."""
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def _split(words):
    """Undo `_joined`."""
    even, odd = tl.split(words.reshape(words.shape[0] // 4, 2, 2))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _values(words, IS_BF16: tl.constexpr):
    """Return the fp32 values of words, bf16 or fp32, in the order of memory."""
    if IS_BF16:
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & 0xFFFF0000).to(tl.float32, bitcast=True)
        return tl.interleave(low, high)
    else:
        return words.to(tl.float32, bitcast=True)


@triton.jit
def _words(values, IS_BF16: tl.constexpr):
    """Undo `_values`; bf16 is rounded to."""
    if IS_BF16:
        raw = values.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
        low, high = tl.split(raw.reshape(raw.shape[0] // 2, 2))
        return low | (high << 16)
    else:
        return values.to(tl.uint32, bitcast=True)


@triton.jit
def _store_to_all(x_ptr, multicast, packs, first, PACKS: tl.constexpr):
    """Do as `_store_to_peers` through a multicast address."""
    source = x_ptr.to(tl.pointer_type(tl.uint32))
    for start in range(tl.program_id(0) * PACKS, packs, tl.num_programs(0) * PACKS):
        word = start * 4 + tl.arange(0, PACKS * 4)
        a, b, c, d = _split(tl.load(source + word, mask=word < packs * 4, other=0))
        pack = start + tl.arange(0, PACKS)
        there = multicast + (first + pack).to(tl.int64) * 16
        _multimem_store(there, a, b, c, d, pack < packs)


@triton.jit
def _sum_of_all(multicast, out_ptr, packs, first, own, PACKS: tl.constexpr):
    """Do as `_sum_of_peers` through a multicast address."""
    target = out_ptr.to(tl.pointer_type(tl.uint32))
    bf16: tl.constexpr = out_ptr.dtype.element_ty == tl.bfloat16
    for start in range(tl.program_id(0) * PACKS, packs, tl.num_programs(0) * PACKS):
        pack = start + tl.arange(0, PACKS)
        there = multicast + (first + pack).to(tl.int64) * 16
        a, b, c, d = _multimem_load(there, pack < own, bf16)
        word = start * 4 + tl.arange(0, PACKS * 4)
        tl.store(target + word, _joined(a, b, c, d), mask=word < packs * 4)


@triton.jit(do_not_specialize=["first", "rank"])
def multimem_all_gather_kernel(
    x_ptr,
    multicast,
    pads_ptr,
    status_ptr,
    packs,
    first,
    rank,
    WORLD: tl.constexpr,
    PACKS: tl.constexpr,
    LIMIT: tl.constexpr,
    TRAP: tl.constexpr,
):
    """Do as `peer_all_gather_kernel` through a multicast address."""
    _store_to_all(x_ptr, multicast, packs, first, PACKS)
    _barrier(pads_ptr, status_ptr, rank, WORLD, LIMIT, TRAP)


@triton.jit(do_not_specialize=["rank"])
def multimem_all_gather_v_kernel(
    x_ptr,
    rows_ptr,
    multicast,
    out_ptr,
    pads_ptr,
    status_ptr,
    packs,
    row_packs,
    rank,
    WORLD: tl.constexpr,
    PACKS: tl.constexpr,
    LIMIT: tl.constexpr,
    TRAP: tl.constexpr,
):
    """Do as `peer_all_gather_v_kernel` through a multicast address."""
    own, first, total = _own_part(rows_ptr, row_packs, packs, rank, WORLD)
    _store_to_all(x_ptr, multicast, own, first, PACKS)
    _clear(out_ptr, total, packs * WORLD, PACKS)
    _barrier(pads_ptr, status_ptr, rank, WORLD, LIMIT, TRAP)


@triton.jit(do_not_specialize=["first", "rank"])
def multimem_reduce_scatter_kernel(
    multicast,
    out_ptr,
    pads_ptr,
    status_ptr,
    packs,
    first,
    rank,
    WORLD: tl.constexpr,
    PACKS: tl.constexpr,
    LIMIT: tl.constexpr,
    TRAP: tl.constexpr,
):
    """Do as `peer_reduce_scatter_kernel` through a multicast address."""
    _barrier(pads_ptr, status_ptr, rank, WORLD, LIMIT, TRAP)
    _sum_of_all(multicast, out_ptr, packs, first, packs, PACKS)


@triton.jit(do_not_specialize=["rank"])
def multimem_reduce_scatter_v_kernel(
    multicast,
    rows_ptr,
    out_ptr,
    pads_ptr,
    status_ptr,
    packs,
    row_packs,
    rank,
    WORLD: tl.constexpr,
    PACKS: tl.constexpr,
    LIMIT: tl.constexpr,
    TRAP: tl.constexpr,
):
    """Do as `peer_reduce_scatter_v_kernel` through a multicast address."""
    _barrier(pads_ptr, status_ptr, rank, WORLD, LIMIT, TRAP)
    own, first, _ = _own_part(rows_ptr, row_packs, packs, rank, WORLD)
    _sum_of_all(multicast, out_ptr, packs, first, own, PACKS)


@triton.jit(do_not_specialize=["first", "rank"])
def multimem_reduce_norm_gather_kernel(
    multicast,
    gathered,
    stream_ptr,
    weight_ptr,
    pads_ptr,
    status_ptr,
    rows,
    row_packs,
    eps,
    offset,
    first,
    rank,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    LIMIT: tl.constexpr,
    TRAP: tl.constexpr,
):
    """Do as `peer_reduce_norm_gather_kernel` through multicast addresses."""
    _barrier(pads_ptr, status_ptr, rank, WORLD, LIMIT, TRAP)
    dtype: tl.constexpr = stream_ptr.dtype.element_ty
    bf16: tl.constexpr = dtype == tl.bfloat16
    WIDTH: tl.constexpr = 128 // dtype.primitive_bitwidth
    features = row_packs * WIDTH
    at = tl.arange(0, BLOCK)
    mask = at < features
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32) + offset
    pack = tl.arange(0, BLOCK // WIDTH)
    inside = pack < row_packs
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        there = (first + row * row_packs + pack).to(tl.int64) * 16
        a, b, c, d = _multimem_load(multicast + there, inside, bf16)
        total = _values(_joined(a, b, c, d), bf16)
        stream = stream_ptr + row * features + at
        total += tl.load(stream, mask=mask, other=0.0).to(tl.float32)
        rounded = total.to(dtype)
        tl.store(stream, rounded, mask=mask)
        total = rounded.to(tl.float32)
        scale = tl.rsqrt(tl.sum(total * total) / features + eps)
        a, b, c, d = _split(_words(total * scale * weight, bf16))
        _multimem_store(gathered + there, a, b, c, d, inside)
    _barrier(pads_ptr, status_ptr, rank, WORLD, LIMIT, TRAP)


def _copy(x: torch.Tensor, peers: Peers) -> tuple[tuple[int], dict[str, object]]:
    """Return the grid and the arguments of a kernel that moves the packs of x."""
    launch, packs = COPY.pick(x), x.nbytes // PACK_BYTES
    grid = (min(peers.programs, triton.cdiv(packs, launch["PACKS"])),)
    return grid, {"packs": packs, "first": peers.rank * packs, **peers.arguments(), **launch}


def _copy_v(
    x: torch.Tensor, rows: torch.Tensor, peers: Peers
) -> tuple[tuple[int], dict[str, object]]:
    """Return the grid and the arguments of a kernel that moves some rows of x [n, h]."""
    launch, packs = COPY.pick(x), x.nbytes // PACK_BYTES
    grid = (min(peers.programs, triton.cdiv(packs, launch["PACKS"])),)
    return grid, {
        "rows_ptr": rows,
        "packs": packs,
        "row_packs": packs // x.shape[0],
        **peers.arguments(),
        **launch,
    }


def _rows(
    stream: torch.Tensor, norm: RowNorm, peers: Peers
) -> tuple[tuple[int], dict[str, object]]:
    """Return the grid and the arguments of a kernel that normalises rows, on at least one warp."""
    rows, features = stream.shape
    row_packs = features * stream.element_size() // PACK_BYTES
    block = triton.next_power_of_2(features)
    return (min(peers.programs, rows),), {
        "stream_ptr": stream,
        "weight_ptr": norm.weight,
        "rows": rows,
        "row_packs": row_packs,
        "eps": norm.epsilon,
        "offset": norm.offset,
        "first": peers.rank * rows * row_packs,
        "BLOCK": block,
        "num_warps": min(16, max(1, block // ROW_PER_WARP)),
        **peers.arguments(),
    }


def peer_all_gather(x: torch.Tensor, buffers: torch.Tensor, peers: Peers) -> None:
    """Store x, contiguous, whole packs, in every rank's buffer, at this rank's place.

    Args:
        buffers: int64 [world], addresses on the device.
    """
    grid, arguments = _copy(x, peers)
    peer_all_gather_kernel[grid](x, buffers, **arguments)


def peer_all_gather_v(
    x: torch.Tensor,
    rows: torch.Tensor,
    buffers: torch.Tensor,
    out: torch.Tensor,
    peers: Peers,
) -> None:
    """Gather, as the package says, in every rank's buffer.

    Args:
        x: [n, h], contiguous, a row being whole packs.
        rows: int32 [world] on the device, how many of each rank's n rows there are.
        buffers: int64 [world], addresses on the device.
        out: [world n, h], what this rank's buffer holds afterwards.
    """
    grid, arguments = _copy_v(x, rows, peers)
    peer_all_gather_v_kernel[grid](x_ptr=x, buffers_ptr=buffers, out_ptr=out, **arguments)


def peer_reduce_scatter_v(
    buffers: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, peers: Peers
) -> None:
    """Reduce and scatter, as the package says, from every rank's buffer to out [n, h]; see
    `peer_all_gather_v`."""
    grid, arguments = _copy_v(out, rows, peers)
    peer_reduce_scatter_v_kernel[grid](buffers_ptr=buffers, out_ptr=out, **arguments)


def peer_reduce_scatter(buffers: torch.Tensor, out: torch.Tensor, peers: Peers) -> None:
    """Sum this rank's place of every rank's buffer into out; see `peer_all_gather`."""
    grid, arguments = _copy(out, peers)
    peer_reduce_scatter_kernel[grid](buffers, out, **arguments)


def peer_reduce_norm_gather(
    buffers: torch.Tensor,
    gathered: torch.Tensor,
    stream: torch.Tensor,
    norm: RowNorm,
    peers: Peers,
) -> None:
    """Sum this rank's place of every rank's buffer, add it to the stream, normalise, and store that
    in every rank's gathered buffer.

    Args:
        buffers, gathered: int64 [world], addresses on the device, of different memory.
        stream: [n, h], contiguous, a row being whole packs; written to.
    """
    grid, arguments = _rows(stream, norm, peers)
    peer_reduce_norm_gather_kernel[grid](buffers, gathered, **arguments)


def multimem_all_gather(x: torch.Tensor, multicast: int, peers: Peers) -> None:
    """Do as `peer_all_gather` through a multicast address."""
    grid, arguments = _copy(x, peers)
    multimem_all_gather_kernel[grid](x, multicast, **arguments)


def multimem_all_gather_v(
    x: torch.Tensor, rows: torch.Tensor, multicast: int, out: torch.Tensor, peers: Peers
) -> None:
    """Do as `peer_all_gather_v` through a multicast address."""
    grid, arguments = _copy_v(x, rows, peers)
    multimem_all_gather_v_kernel[grid](x_ptr=x, multicast=multicast, out_ptr=out, **arguments)


def multimem_reduce_scatter_v(
    multicast: int, rows: torch.Tensor, out: torch.Tensor, peers: Peers
) -> None:
    """Do as `peer_reduce_scatter_v` through a multicast address."""
    grid, arguments = _copy_v(out, rows, peers)
    multimem_reduce_scatter_v_kernel[grid](multicast=multicast, out_ptr=out, **arguments)


def multimem_reduce_scatter(multicast: int, out: torch.Tensor, peers: Peers) -> None:
    """Do as `peer_reduce_scatter` through a multicast address."""
    grid, arguments = _copy(out, peers)
    multimem_reduce_scatter_kernel[grid](multicast, out, **arguments)


def multimem_reduce_norm_gather(
    multicast: int, gathered: int, stream: torch.Tensor, norm: RowNorm, peers: Peers
) -> None:
    """Do as `peer_reduce_norm_gather` through multicast addresses."""
    grid, arguments = _rows(stream, norm, peers)
    multimem_reduce_norm_gather_kernel[grid](multicast, gathered, **arguments)
