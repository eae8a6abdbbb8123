# SPDX-License-Identifier: Apache-2.0
"""All-gather and reduce-scatter over symmetric memory in Triton, two transports for each.

| transport | all-gather | reduce-scatter |
|---|---|---|
| multimem | a store to the multicast address: the switch copies it | a load: the switch sums |
| p2p | a store to each rank's buffer | a load from each rank's buffer, summed in fp32 |

A third kernel fuses both between two transformer blocks: reduce-scatter the partial sums, add the
result to the residual stream, apply RMSNorm, all-gather.

The kernels for ranks with different numbers of rows (all-gather-v, reduce-scatter-v) read the
row counts on the device. The host does not know the counts, so a CUDA graph can be replayed with
other counts. Grid, barriers and shapes depend on the largest possible number of rows; rows that are
not real are zero in the result. `ops.nvls` defines the layout.

A kernel takes addresses instead of tensors of other ranks: a table int64 [world] of the ranks'
buffers and one of their signal pads. All kernels move packs of 16 bytes: multimem through PTX that
the interpreter cannot run (PTX ISA, `multimem`), p2p in plain Triton.

The barrier: program b of rank r owns slot [b, s] of its pad for every source rank s. It sets its
slot on every rank from 0 to 1, then resets its own slots from 1 to 0. Pads are therefore 0 after
every kernel, and a kernel in a CUDA graph can be replayed. A slot can be set only after it was
reset, so all programs of a kernel must be resident at once, and a pad has `programs` x `world`
slots of 4 bytes.

- all-gather ends with a barrier: stores before it (release) are visible after it (acquire);
- reduce-scatter begins with a barrier: the peers' inputs are complete. It has none at its end,
  because two buffers alternate: a rank passes another barrier before it writes to the same buffer;
- the fused kernel has both; each program waits for the programs with the same rows on all ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron.core.ops.launches import Launches
from megatron.core.ops.nvls import PACK_BYTES, PeerGroup, RowNorm

#: Packs that a program moves per iteration: one per thread.
COPY = Launches("nvls_copy", {"PACKS": 512, "num_warps": 16})
#: Elements of a row per warp in the fused kernels, 16 per thread.
ROW_PER_WARP = 512


@triton.jit
def _exchange_slots(slots, is_peer, OLD: tl.constexpr, SEM: tl.constexpr, LIMIT: tl.constexpr):
    """Turn slots from OLD to 1 - OLD, each once; return which of the peers' slots timed out."""
    pending, tries = is_peer, 0
    while (tl.sum(pending.to(tl.int32)) > 0) & ((LIMIT == 0) | (tries < LIMIT)):
        # A finished slot, or one beyond WORLD, expects 2, a value that no slot ever has.
        expected = tl.where(pending, OLD, 2)
        previous = tl.atomic_cas(
            slots, expected, tl.full(slots.shape, 1 - OLD, tl.int32), SEM, "sys"
        )
        pending = pending & (previous != OLD)
        tries += 1
    return pending


@triton.jit
def _trap():
    """Stop the device, after everything it stored is visible to the host."""
    zero = tl.program_id(0) * 0
    zero = tl.inline_asm_elementwise(
        "fence.acq_rel.sys; mov.u32 $0, $1;", "=r,r", [zero], tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()  # every thread has passed the fence after its stores
    tl.inline_asm_elementwise(
        "trap; mov.u32 $0, $1;", "=r,r", [zero], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _barrier(
    pads_ptr, status_ptr, rank, WORLD: tl.constexpr, LIMIT: tl.constexpr, TRAP: tl.constexpr
):
    """Wait for the same program of all ranks, with one thread for each rank.

    With LIMIT > 0 each slot is polled at most LIMIT times. On a time-out the program writes 1 + the
    missing peer's rank to the status, and stops the device with TRAP; without TRAP it continues
    with invalid results.
    """
    SLOTS: tl.constexpr = triton.next_power_of_2(WORLD)
    peer = tl.arange(0, SLOTS)
    is_peer = peer < WORLD
    clamped_peer = tl.minimum(peer, WORLD - 1)
    program_slots = tl.program_id(0) * WORLD
    peer_slots = (
        tl.load(pads_ptr + clamped_peer).to(tl.pointer_type(tl.int32)) + program_slots + rank
    )
    local_slots = (
        tl.load(pads_ptr + rank).to(tl.pointer_type(tl.int32)) + program_slots + clamped_peer
    )
    tl.debug_barrier()  # all loads and stores of the program precede the release
    timed_out = _exchange_slots(peer_slots, is_peer, 0, "release", LIMIT)
    timed_out |= _exchange_slots(local_slots, is_peer, 1, "acquire", LIMIT)
    tl.debug_barrier()  # all loads of the program follow the acquire
    if LIMIT > 0:
        missing = tl.max(tl.where(timed_out, 1 + peer, 0))
        if missing > 0:
            tl.store(status_ptr, missing)
            if TRAP:
                _trap()


@triton.jit
def _peer_buffer(buffers_ptr, peer, dtype: tl.constexpr):
    """Return a rank's buffer, aligned to a pack."""
    return tl.multiple_of(tl.load(buffers_ptr + peer).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _peer_sum(buffers_ptr, offsets, mask, dtype: tl.constexpr, WORLD: tl.constexpr):
    """Return the sum over ranks of their buffers' elements, fp32."""
    total = tl.zeros(offsets.shape, tl.float32)
    for peer in range(WORLD):
        pointers = _peer_buffer(buffers_ptr, peer, dtype) + offsets
        # Volatile: no load of shared memory may move over the barrier.
        total += tl.load(pointers, mask=mask, other=0.0, volatile=True).to(tl.float32)
    return total


@triton.jit
def _local_range(rows_ptr, row_packs, packs, rank, WORLD: tl.constexpr):
    """Return the packs of this rank's rows, of the rows of lower ranks, and of all rows.

    A rank never has more than `packs`, even if its row count on the device is corrupt.
    """
    peer = tl.arange(0, triton.next_power_of_2(WORLD))
    counts = tl.load(rows_ptr + peer, mask=peer < WORLD, other=0)
    counts = tl.minimum(tl.maximum(counts, 0) * row_packs, packs)
    local_packs = tl.sum(tl.where(peer == rank, counts, 0))
    return local_packs, tl.sum(tl.where(peer < rank, counts, 0)), tl.sum(counts)


@triton.jit
def _store_zeros(out_ptr, first_pack, end, PACKS: tl.constexpr):
    """Store zeros in packs `first_pack` to `end` - 1."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    WIDTH: tl.constexpr = 128 // dtype.primitive_bitwidth
    for start in range(first_pack + tl.program_id(0) * PACKS, end, tl.num_programs(0) * PACKS):
        offsets = start * WIDTH + tl.arange(0, PACKS * WIDTH)
        tl.store(out_ptr + offsets, tl.zeros(offsets.shape, dtype), mask=offsets < end * WIDTH)


@triton.jit
def _store_to_peers(
    x_ptr, buffers_ptr, packs, first_pack, WORLD: tl.constexpr, PACKS: tl.constexpr
):
    """Store the packs of x from pack `first_pack` on in every rank's buffer."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    WIDTH: tl.constexpr = 128 // dtype.primitive_bitwidth  # elements of a pack
    for start in range(tl.program_id(0) * PACKS, packs, tl.num_programs(0) * PACKS):
        offsets = start * WIDTH + tl.arange(0, PACKS * WIDTH)
        mask = offsets < packs * WIDTH
        x = tl.load(x_ptr + offsets, mask=mask)
        for peer in range(WORLD):
            tl.store(
                _peer_buffer(buffers_ptr, peer, dtype) + (first_pack * WIDTH + offsets),
                x,
                mask=mask,
            )


@triton.jit
def _store_peer_sum(
    buffers_ptr, out_ptr, packs, first_pack, local_packs, WORLD: tl.constexpr, PACKS: tl.constexpr
):
    """Sum the ranks' buffers from pack `first_pack` on into out; zeros from `local_packs` on."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    WIDTH: tl.constexpr = 128 // dtype.primitive_bitwidth
    for start in range(tl.program_id(0) * PACKS, packs, tl.num_programs(0) * PACKS):
        offsets = start * WIDTH + tl.arange(0, PACKS * WIDTH)
        total = _peer_sum(
            buffers_ptr, first_pack * WIDTH + offsets, offsets < local_packs * WIDTH, dtype, WORLD
        )
        tl.store(out_ptr + offsets, total.to(dtype), mask=offsets < packs * WIDTH)


@triton.jit(do_not_specialize=["first_pack", "rank"])
def peer_all_gather_kernel(
    x_ptr,
    buffers_ptr,
    pads_ptr,
    status_ptr,
    packs,
    first_pack,
    rank,
    WORLD: tl.constexpr,
    PACKS: tl.constexpr,
    LIMIT: tl.constexpr,
    TRAP: tl.constexpr,
):
    """Store the packs of x from pack `first_pack` on in every rank's buffer."""
    _store_to_peers(x_ptr, buffers_ptr, packs, first_pack, WORLD, PACKS)
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
    """Store this rank's rows after the rows of lower ranks in every rank's buffer.

    `out`, this rank's own buffer, gets zeros after the rows of all ranks.
    """
    local_packs, first_pack, total = _local_range(rows_ptr, row_packs, packs, rank, WORLD)
    _store_to_peers(x_ptr, buffers_ptr, local_packs, first_pack, WORLD, PACKS)
    _store_zeros(out_ptr, total, packs * WORLD, PACKS)
    _barrier(pads_ptr, status_ptr, rank, WORLD, LIMIT, TRAP)


@triton.jit(do_not_specialize=["first_pack", "rank"])
def peer_reduce_scatter_kernel(
    buffers_ptr,
    out_ptr,
    pads_ptr,
    status_ptr,
    packs,
    first_pack,
    rank,
    WORLD: tl.constexpr,
    PACKS: tl.constexpr,
    LIMIT: tl.constexpr,
    TRAP: tl.constexpr,
):
    """Sum the ranks' buffers from pack `first_pack` on into the packs of out."""
    _barrier(pads_ptr, status_ptr, rank, WORLD, LIMIT, TRAP)
    _store_peer_sum(buffers_ptr, out_ptr, packs, first_pack, packs, WORLD, PACKS)


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
    """Sum this rank's rows, which follow the rows of lower ranks, into out, followed by zeros."""
    _barrier(pads_ptr, status_ptr, rank, WORLD, LIMIT, TRAP)
    local_packs, first_pack, _ = _local_range(rows_ptr, row_packs, packs, rank, WORLD)
    _store_peer_sum(buffers_ptr, out_ptr, packs, first_pack, local_packs, WORLD, PACKS)


@triton.jit(do_not_specialize=["first_pack", "rank"])
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
    first_pack,
    rank,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    LIMIT: tl.constexpr,
    TRAP: tl.constexpr,
):
    """Reduce-scatter rows, add them to the residual [rows, h] in place, and all-gather RMSNorm.

    The normalised rows are stored from pack `first_pack` on in every rank's gathered buffer. A
    program handles one row at a time, in one block. The buffer that is read and the buffer that is
    written are different memory, because a peer may write before this rank has read.
    """
    _barrier(pads_ptr, status_ptr, rank, WORLD, LIMIT, TRAP)
    dtype: tl.constexpr = stream_ptr.dtype.element_ty
    WIDTH: tl.constexpr = 128 // dtype.primitive_bitwidth
    features = row_packs * WIDTH
    columns = tl.arange(0, BLOCK)
    mask = columns < features
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32) + offset
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        stream = stream_ptr + row * features + columns
        offsets = (first_pack + row * row_packs) * WIDTH + columns
        hidden = _peer_sum(buffers_ptr, offsets, mask, dtype, WORLD)
        hidden += tl.load(stream, mask=mask, other=0.0).to(tl.float32)
        rounded = hidden.to(dtype)
        tl.store(stream, rounded, mask=mask)
        hidden = rounded.to(tl.float32)  # normalise the rounded value, which the next block adds to
        scale = tl.rsqrt(tl.sum(hidden * hidden) / features + eps)
        normed = (hidden * scale * weight).to(dtype)
        for peer in range(WORLD):
            tl.store(_peer_buffer(gathered_ptr, peer, dtype) + offsets, normed, mask=mask)
    _barrier(pads_ptr, status_ptr, rank, WORLD, LIMIT, TRAP)


@triton.jit
def _multimem_load(address, mask, IS_BF16: tl.constexpr):
    """Return the sum over ranks of the packs of 16 bytes at multicast addresses, as 4 x uint32."""
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
def _interleave_words(a, b, c, d):
    """Return words [4 n] in memory order from the four words [n] of each pack."""
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def _split_words(words):
    """Undo `_interleave_words`."""
    even_words, odd_words = tl.split(words.reshape(words.shape[0] // 4, 2, 2))
    a, c = tl.split(even_words)
    b, d = tl.split(odd_words)
    return a, b, c, d


@triton.jit
def _unpack_words(words, IS_BF16: tl.constexpr):
    """Return the fp32 values of words that hold bf16 or fp32, in memory order."""
    if IS_BF16:
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & 0xFFFF0000).to(tl.float32, bitcast=True)
        return tl.interleave(low, high)
    else:
        return words.to(tl.float32, bitcast=True)


@triton.jit
def _pack_values(values, IS_BF16: tl.constexpr):
    """Undo `_unpack_words`; values are rounded to bf16 if IS_BF16."""
    if IS_BF16:
        raw = values.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
        low, high = tl.split(raw.reshape(raw.shape[0] // 2, 2))
        return low | (high << 16)
    else:
        return values.to(tl.uint32, bitcast=True)


@triton.jit
def _multicast_store(x_ptr, multicast, packs, first_pack, PACKS: tl.constexpr):
    """Like `_store_to_peers`, through a multicast address."""
    source = x_ptr.to(tl.pointer_type(tl.uint32))
    for start in range(tl.program_id(0) * PACKS, packs, tl.num_programs(0) * PACKS):
        word = start * 4 + tl.arange(0, PACKS * 4)
        a, b, c, d = _split_words(tl.load(source + word, mask=word < packs * 4, other=0))
        pack = start + tl.arange(0, PACKS)
        pointers = multicast + (first_pack + pack).to(tl.int64) * 16
        _multimem_store(pointers, a, b, c, d, pack < packs)


@triton.jit
def _multicast_sum(multicast, out_ptr, packs, first_pack, local_packs, PACKS: tl.constexpr):
    """Like `_store_peer_sum`, through a multicast address."""
    target = out_ptr.to(tl.pointer_type(tl.uint32))
    bf16: tl.constexpr = out_ptr.dtype.element_ty == tl.bfloat16
    for start in range(tl.program_id(0) * PACKS, packs, tl.num_programs(0) * PACKS):
        pack = start + tl.arange(0, PACKS)
        pointers = multicast + (first_pack + pack).to(tl.int64) * 16
        a, b, c, d = _multimem_load(pointers, pack < local_packs, bf16)
        word = start * 4 + tl.arange(0, PACKS * 4)
        tl.store(target + word, _interleave_words(a, b, c, d), mask=word < packs * 4)


@triton.jit(do_not_specialize=["first_pack", "rank"])
def multimem_all_gather_kernel(
    x_ptr,
    multicast,
    pads_ptr,
    status_ptr,
    packs,
    first_pack,
    rank,
    WORLD: tl.constexpr,
    PACKS: tl.constexpr,
    LIMIT: tl.constexpr,
    TRAP: tl.constexpr,
):
    """Like `peer_all_gather_kernel`, through a multicast address."""
    _multicast_store(x_ptr, multicast, packs, first_pack, PACKS)
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
    """Like `peer_all_gather_v_kernel`, through a multicast address."""
    local_packs, first_pack, total = _local_range(rows_ptr, row_packs, packs, rank, WORLD)
    _multicast_store(x_ptr, multicast, local_packs, first_pack, PACKS)
    _store_zeros(out_ptr, total, packs * WORLD, PACKS)
    _barrier(pads_ptr, status_ptr, rank, WORLD, LIMIT, TRAP)


@triton.jit(do_not_specialize=["first_pack", "rank"])
def multimem_reduce_scatter_kernel(
    multicast,
    out_ptr,
    pads_ptr,
    status_ptr,
    packs,
    first_pack,
    rank,
    WORLD: tl.constexpr,
    PACKS: tl.constexpr,
    LIMIT: tl.constexpr,
    TRAP: tl.constexpr,
):
    """Like `peer_reduce_scatter_kernel`, through a multicast address."""
    _barrier(pads_ptr, status_ptr, rank, WORLD, LIMIT, TRAP)
    _multicast_sum(multicast, out_ptr, packs, first_pack, packs, PACKS)


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
    """Like `peer_reduce_scatter_v_kernel`, through a multicast address."""
    _barrier(pads_ptr, status_ptr, rank, WORLD, LIMIT, TRAP)
    local_packs, first_pack, _ = _local_range(rows_ptr, row_packs, packs, rank, WORLD)
    _multicast_sum(multicast, out_ptr, packs, first_pack, local_packs, PACKS)


@triton.jit(do_not_specialize=["first_pack", "rank"])
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
    first_pack,
    rank,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    LIMIT: tl.constexpr,
    TRAP: tl.constexpr,
):
    """Like `peer_reduce_norm_gather_kernel`, through multicast addresses."""
    _barrier(pads_ptr, status_ptr, rank, WORLD, LIMIT, TRAP)
    dtype: tl.constexpr = stream_ptr.dtype.element_ty
    bf16: tl.constexpr = dtype == tl.bfloat16
    WIDTH: tl.constexpr = 128 // dtype.primitive_bitwidth
    features = row_packs * WIDTH
    columns = tl.arange(0, BLOCK)
    mask = columns < features
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32) + offset
    pack = tl.arange(0, BLOCK // WIDTH)
    pack_mask = pack < row_packs
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        offsets = (first_pack + row * row_packs + pack).to(tl.int64) * 16
        a, b, c, d = _multimem_load(multicast + offsets, pack_mask, bf16)
        hidden = _unpack_words(_interleave_words(a, b, c, d), bf16)
        stream = stream_ptr + row * features + columns
        hidden += tl.load(stream, mask=mask, other=0.0).to(tl.float32)
        rounded = hidden.to(dtype)
        tl.store(stream, rounded, mask=mask)
        hidden = rounded.to(tl.float32)
        scale = tl.rsqrt(tl.sum(hidden * hidden) / features + eps)
        a, b, c, d = _split_words(_pack_values(hidden * scale * weight, bf16))
        _multimem_store(gathered + offsets, a, b, c, d, pack_mask)
    _barrier(pads_ptr, status_ptr, rank, WORLD, LIMIT, TRAP)


def _copy_launch(x: torch.Tensor, peers: PeerGroup) -> tuple[tuple[int], dict[str, object]]:
    """Return the grid and the arguments of a kernel that moves the packs of x."""
    launch, packs = COPY.pick(x), x.nbytes // PACK_BYTES
    grid = (min(peers.programs, triton.cdiv(packs, launch["PACKS"])),)
    return grid, {"packs": packs, "first_pack": peers.rank * packs, **peers.kernel_args(), **launch}


def _copy_v_launch(
    x: torch.Tensor, rows: torch.Tensor, peers: PeerGroup
) -> tuple[tuple[int], dict[str, object]]:
    """Return the grid and the arguments of a "v" kernel that moves the real rows of x [n, h]."""
    launch, packs = COPY.pick(x), x.nbytes // PACK_BYTES
    grid = (min(peers.programs, triton.cdiv(packs, launch["PACKS"])),)
    return grid, {
        "rows_ptr": rows,
        "packs": packs,
        "row_packs": packs // x.shape[0],
        **peers.kernel_args(),
        **launch,
    }


def _norm_launch(
    stream: torch.Tensor, norm: RowNorm, peers: PeerGroup
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
        "first_pack": peers.rank * rows * row_packs,
        "BLOCK": block,
        "num_warps": min(16, max(1, block // ROW_PER_WARP)),
        **peers.kernel_args(),
    }


def peer_all_gather(x: torch.Tensor, buffers: torch.Tensor, peers: PeerGroup) -> None:
    """Store x in every rank's buffer, at this rank's offset.

    Args:
        x: contiguous, of whole packs.
        buffers: int64 [world], addresses on the device.
    """
    grid, arguments = _copy_launch(x, peers)
    peer_all_gather_kernel[grid](x, buffers, **arguments)


def peer_all_gather_v(
    x: torch.Tensor,
    rows: torch.Tensor,
    buffers: torch.Tensor,
    out: torch.Tensor,
    peers: PeerGroup,
) -> None:
    """All-gather the real rows of all ranks into every rank's buffer, see `ops.nvls`.

    Args:
        x: [n, h], contiguous; a row is whole packs.
        rows: int32 [world] on the device, number of real rows of each rank.
        buffers: int64 [world], addresses on the device.
        out: [world n, h], a view of this rank's buffer.
    """
    grid, arguments = _copy_v_launch(x, rows, peers)
    peer_all_gather_v_kernel[grid](x_ptr=x, buffers_ptr=buffers, out_ptr=out, **arguments)


def peer_reduce_scatter_v(
    buffers: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, peers: PeerGroup
) -> None:
    """Reduce-scatter the real rows of all buffers to out [n, h]; see `peer_all_gather_v`."""
    grid, arguments = _copy_v_launch(out, rows, peers)
    peer_reduce_scatter_v_kernel[grid](buffers_ptr=buffers, out_ptr=out, **arguments)


def peer_reduce_scatter(buffers: torch.Tensor, out: torch.Tensor, peers: PeerGroup) -> None:
    """Sum this rank's shard of every rank's buffer into out; see `peer_all_gather`."""
    grid, arguments = _copy_launch(out, peers)
    peer_reduce_scatter_kernel[grid](buffers, out, **arguments)


def peer_reduce_norm_gather(
    buffers: torch.Tensor,
    gathered: torch.Tensor,
    stream: torch.Tensor,
    norm: RowNorm,
    peers: PeerGroup,
) -> None:
    """Sum this rank's shard of every buffer, add it to the residual, and all-gather its RMSNorm.

    Args:
        buffers, gathered: int64 [world], addresses on the device, of different memory.
        stream: residual [n, h], contiguous; a row is whole packs; updated in place.
    """
    grid, arguments = _norm_launch(stream, norm, peers)
    peer_reduce_norm_gather_kernel[grid](buffers, gathered, **arguments)


def multimem_all_gather(x: torch.Tensor, multicast: int, peers: PeerGroup) -> None:
    """Like `peer_all_gather`, through a multicast address."""
    grid, arguments = _copy_launch(x, peers)
    multimem_all_gather_kernel[grid](x, multicast, **arguments)


def multimem_all_gather_v(
    x: torch.Tensor, rows: torch.Tensor, multicast: int, out: torch.Tensor, peers: PeerGroup
) -> None:
    """Like `peer_all_gather_v`, through a multicast address."""
    grid, arguments = _copy_v_launch(x, rows, peers)
    multimem_all_gather_v_kernel[grid](x_ptr=x, multicast=multicast, out_ptr=out, **arguments)


def multimem_reduce_scatter_v(
    multicast: int, rows: torch.Tensor, out: torch.Tensor, peers: PeerGroup
) -> None:
    """Like `peer_reduce_scatter_v`, through a multicast address."""
    grid, arguments = _copy_v_launch(out, rows, peers)
    multimem_reduce_scatter_v_kernel[grid](multicast=multicast, out_ptr=out, **arguments)


def multimem_reduce_scatter(multicast: int, out: torch.Tensor, peers: PeerGroup) -> None:
    """Like `peer_reduce_scatter`, through a multicast address."""
    grid, arguments = _copy_launch(out, peers)
    multimem_reduce_scatter_kernel[grid](multicast, out, **arguments)


def multimem_reduce_norm_gather(
    multicast: int, gathered: int, stream: torch.Tensor, norm: RowNorm, peers: PeerGroup
) -> None:
    """Like `peer_reduce_norm_gather`, through multicast addresses."""
    grid, arguments = _norm_launch(stream, norm, peers)
    multimem_reduce_norm_gather_kernel[grid](multicast, gathered, **arguments)
