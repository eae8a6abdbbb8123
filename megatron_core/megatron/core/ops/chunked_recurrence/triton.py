# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule and SSD as a `Recurrence` of Triton kernels: launches and what is kept.

How the kernels of recurrences may be started; `triton.py` picks from these.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.core.ops.backend_choice import uses_tensor_memory
from megatron.core.ops.chunked_recurrence.kernels import (
    Tiles,
    recurrence_gradients_kernel,
    reverse_sweep_kernel,
    seen_kernel,
    sum_units_kernel,
    sweep_kernel,
)
from megatron.core.ops.launches import Launches, cdiv, next_power_of_2
from megatron.core.ops.recurrence import RecurrenceInputs
from megatron.core.ops.sequences import Sequences

# With three stages the next chunk is on its way while this one is worked on; with two it is waited
# for. Narrow tiles give one long sequence the most programs, wide ones do less of a chunk twice.
SWEEP = Launches(
    "recurrence_sweep",
    {"BLOCK_V": 32, "num_warps": 4, "num_stages": 3},
    alternatives=(
        {"BLOCK_V": 32, "num_warps": 4, "num_stages": 2},
        {"BLOCK_V": 64, "num_warps": 4, "num_stages": 3},
        {"BLOCK_V": 64, "num_warps": 8, "num_stages": 3},
        {"BLOCK_V": 16, "num_warps": 4, "num_stages": 3},
    ),
)
# Of SSD, whose sweep also makes what queries see. Its products have 64 rows, which fill one warp
# group: two would both make most of them.
SWEEP_DUAL = Launches(
    "recurrence_sweep_dual",
    {"BLOCK_V": 64, "num_warps": 4, "num_stages": 3},
    alternatives=(
        {"BLOCK_V": 64, "num_warps": 8, "num_stages": 3},
        {"BLOCK_V": 32, "num_warps": 4, "num_stages": 3},
        {"BLOCK_V": 32, "num_warps": 4, "num_stages": 2},
    ),
)
# Of more than 128 features of keys, and of fp32, of which each product is three.
SWEEP_TALL = Launches("recurrence_sweep_tall", {"BLOCK_V": 16, "num_warps": 4, "num_stages": 2})
SWEEP_WIDE = Launches("recurrence_sweep_fp32", {"BLOCK_V": 16, "num_warps": 8, "num_stages": 1})

REVERSE = Launches(
    "recurrence_reverse",
    {"BLOCK_V": 32, "num_warps": 4, "num_stages": 3},
    alternatives=(
        {"BLOCK_V": 32, "num_warps": 4, "num_stages": 2},
        {"BLOCK_V": 64, "num_warps": 8, "num_stages": 3},
        {"BLOCK_V": 64, "num_warps": 8, "num_stages": 2},
    ),
)
REVERSE_TALL = Launches("recurrence_reverse_tall", {"BLOCK_V": 16, "num_warps": 4, "num_stages": 2})
REVERSE_WIDE = Launches("recurrence_reverse_fp32", {"BLOCK_V": 16, "num_warps": 8, "num_stages": 1})
SEEN = Launches("recurrence_seen", {"num_warps": 4, "num_stages": 1})
# HEADS of a group that one program works on, at most; what those of several programs add up to is
# summed up in memory. Of SSD the sums stay in registers from head to head. Of the delta rule, whose
# products fill these, they are added to what the program stored, which its L2 cache still has.
GRADIENTS = Launches(
    "recurrence_gradients",
    {"HEADS": 8, "BLOCK_V": 128, "num_warps": 8, "num_stages": 1},
    alternatives=({"HEADS": 1, "BLOCK_V": 128, "num_warps": 8, "num_stages": 1},),
)
GRADIENTS_DUAL = Launches(
    "recurrence_gradients_dual",
    {"HEADS": 16, "BLOCK_V": 32, "num_warps": 8, "num_stages": 1},
    alternatives=(
        {"HEADS": 16, "BLOCK_V": 64, "num_warps": 8, "num_stages": 1},
        {"HEADS": 1, "BLOCK_V": 32, "num_warps": 8, "num_stages": 1},
        {"HEADS": 1, "BLOCK_V": 64, "num_warps": 8, "num_stages": 1},
    ),
)
# Of more than 128 features of keys, and of fp32: what fits in shared memory.
GRADIENTS_TALL = Launches(
    "recurrence_gradients_tall", {"BLOCK_V": 64, "num_warps": 8, "num_stages": 1}
)
# With all values in one block both warp groups would make the same products.
GRADIENTS_DUAL_TALL = Launches(
    "recurrence_gradients_dual_tall", {"BLOCK_V": 32, "num_warps": 8, "num_stages": 1}
)
GRADIENTS_WIDE = Launches(
    "recurrence_gradients_fp32", {"BLOCK_V": 16, "num_warps": 8, "num_stages": 1}
)


# Maximum tokens of a chunk in fp32. Each operand of a product is split in three for the tensor
# cores, and those of longer chunks spill: the gradients of the delta rule, which read keys as well,
# take 632 bytes of stack with 32 tokens and 184 with 16.
FP32_CHUNK, FP32_CHUNK_DELTA_RULE = 32, 16
# Programs of the gradients kernel that keep a GPU busy: 132 to 148 processors, one or two each.
PROGRAMS = 512


@dataclass
class PreparedOnDevice:
    """What `TritonRecurrence` keeps from one operation to the next.

    Args:
        inputs: as they were given, the last dimension of each contiguous.
        tiles: the chunks of their tokens.
        scale: of queries.
        sums: fp32 [2, n, H, C], decays summed up within a chunk: rounded, and what that took off.
        solved: T ∘ D [n, H, C, C] in value's dtype; None where nothing is corrected.
        seen: scale (Q Kᵀ) ∘ D, likewise, until a sweep has read it; None where sweeps make it.
        initial: the first states [N, H, K, V] of the sweep, fp32; None is zeros.
        starts: the states before chunks [n, H, K, V] in value's dtype, from a sweep that keeps
            them; None where backward computes them again.
    """

    inputs: RecurrenceInputs
    tiles: Tiles
    scale: float
    sums: torch.Tensor
    solved: torch.Tensor | None = None
    seen: torch.Tensor | None = None
    initial: torch.Tensor | None = None
    starts: torch.Tensor | None = None

    @property
    def corrects(self) -> bool:
        """Whether tokens are corrected by what the state holds already."""
        return self.solved is not None

    @property
    def sees_ahead(self) -> bool:
        """Whether scale (Q Kᵀ) ∘ D is made before a sweep, in more memory.

        The sweeps of the delta rule are long enough without it; with tall keys, or of fp32, they
        would have no registers for it.
        """
        return self.corrects or self.keys > 128 or self.inputs.value.dtype == torch.float32

    @property
    def heads(self) -> int:
        """H."""
        return self.inputs.value.shape[1]

    @property
    def keys(self) -> int:
        """K."""
        return self.inputs.key.shape[2]

    @property
    def values(self) -> int:
        """V."""
        return self.inputs.value.shape[2]

    def states(self, dtype: torch.dtype = torch.float32, count: int | None = None) -> torch.Tensor:
        """Return memory for `count` states [count, H, K, V]; None is one a sequence."""
        count = self.tiles.sequence_count if count is None else count
        shape = (count, self.heads, self.keys, self.values)
        return self.inputs.value.new_empty(shape, dtype=dtype)

    def arguments(self, columns: int | None = None) -> tuple:
        """Return what every kernel of the recurrence reads, in the order of its parameters.

        `columns` stands in for the features of values. The order is:
        query, key, value, strength, sums, solved; first, end, begin; scale; the numbers of chunks,
        heads, heads of a group, features of keys and of values; the strides of query, key, value
        (token, head) and strength (token, head).
        """
        query, key, value, _, strength = self.inputs
        tiles = self.tiles
        return (
            *(query, key, value, strength, self.sums),
            self.sums if self.solved is None else self.solved,
            *(tiles.first, tiles.end, tiles.begin),
            self.scale,
            *(tiles.count, self.heads, self.heads // key.shape[1], self.keys),
            self.values if columns is None else columns,
            *(stride for x in (query, key, value, strength) for stride in x.stride()[:2]),
        )

    def constants(self) -> dict[str, object]:
        """Return the compile-time constants of every kernel of the recurrence."""
        return {
            "CORRECTS": self.corrects,
            "CHUNK": self.tiles.size,
            "KEYS": padded(self.keys),
            "PRECISION": product_precision(self.inputs.value),
        }


@dataclass(frozen=True)
class TritonRecurrence:
    """The gated delta rule, or SSD, as a `Recurrence` of Triton kernels.

    Args:
        corrects: whether a token is corrected by what the state holds: the delta rule.
        scale: of queries; None is K^-0.5.
        chunk_size: tokens C of a chunk, 16, 32 or 64; in fp32 at most `fp32_chunk`.
    """

    corrects: bool
    scale: float | None
    chunk_size: int

    def prepare(self, inputs: RecurrenceInputs, sequences: Sequences) -> PreparedOnDevice:
        """See `Recurrence`."""
        inputs = RecurrenceInputs(*map(dense, inputs[:3]), *inputs[3:])
        size = self.chunk_size
        if inputs.value.dtype == torch.float32:
            size = min(size, fp32_chunk(corrects=self.corrects, keys=inputs.key.shape[-1]))
        tiles = Tiles.of(sequences, size)
        scale = inputs.key.shape[-1] ** -0.5 if self.scale is None else self.scale
        if self.corrects:
            from megatron.core.ops.gated_delta_rule.triton import solve

            sums, solved, seen = solve(inputs, tiles, scale)
            return PreparedOnDevice(inputs, tiles, scale, sums, solved, seen)
        from megatron.core.ops.state_space_dual.triton import sum_decays

        prepared = PreparedOnDevice(inputs, tiles, scale, sum_decays(inputs.decay, tiles))
        see(prepared)
        return prepared

    def sweep(
        self,
        prepared: PreparedOnDevice,
        initial: torch.Tensor | None,
        *,
        keep_states: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Recurrence`."""
        prepared.initial = None if initial is None else initial.float().contiguous()
        value = prepared.inputs.value
        out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        last = prepared.states()
        if keep_states:
            prepared.starts = prepared.states(value.dtype, prepared.tiles.count)
        sweep(prepared, initial=prepared.initial, out=out, starts=prepared.starts, last=last)
        prepared.seen = None
        return out, last

    def summary(self, prepared: PreparedOnDevice) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Recurrence`."""
        states = prepared.states()
        count, heads, keys, _ = states.shape
        if self.corrects:
            transition = states.new_empty((count, heads, keys, keys))
            sweep(prepared, last=states)
            sweep(prepared, last=transition, without_values=True)
        else:
            transition = states.new_empty((count, heads, 1, 1))
            sweep(prepared, last=states, total=transition)
        return states, transition

    def state_gradient(self, prepared: PreparedOnDevice, grad: torch.Tensor) -> torch.Tensor:
        """See `Recurrence`."""
        initial = prepared.states()
        see(prepared)
        reverse_sweep(prepared, dense(grad), grad_initial=initial)
        return initial

    def backward(
        self, prepared: PreparedOnDevice, grad: torch.Tensor, grad_last: torch.Tensor | None
    ) -> tuple[RecurrenceInputs, torch.Tensor]:
        """See `Recurrence`."""
        grad, value = dense(grad), prepared.inputs.value
        starts, ends = prepared.starts, prepared.states(value.dtype, prepared.tiles.count)
        x = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        initial = prepared.states()
        if starts is None:
            starts = torch.empty_like(ends)
            sweep(prepared, initial=prepared.initial, starts=starts)
        see(prepared)
        grad_last = None if grad_last is None else grad_last.float().contiguous()
        reverse_sweep(prepared, grad, grad_last=grad_last, ends=ends, x=x, grad_initial=initial)
        prepared.seen = None
        return gradients(prepared, grad, starts=starts, ends=ends, x=x), initial


def sweep(
    prepared: PreparedOnDevice,
    *,
    initial: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    last: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
    without_values: bool = False,
) -> None:
    """Carry states through all chunks; write what is given memory.

    Args:
        prepared: by `TritonRecurrence.prepare`.
        initial: first states, fp32 [N, H, K, V]; None is zeros.
        out: [t, H, V].
        starts: [n, H, K, V], the state before each chunk, in value's dtype.
        last: fp32 [N, H, K, V]; [N, H, K, K] without values.
        total: fp32 [N, H, 1, 1], exp of the decays of each sequence.
        without_values: begin with the identity and leave values out, so that `last` is M.
    """
    columns = prepared.keys if without_values else prepared.values
    narrow = SWEEP if prepared.corrects else SWEEP_DUAL
    narrow = narrow if prepared.keys <= 128 else SWEEP_TALL
    launch = launch_of(narrow, SWEEP_WIDE, prepared, columns)
    units = prepared.tiles.sequence_count * prepared.heads
    seen, unused = prepared.seen, prepared.sums
    sweep_kernel[(units * cdiv(columns, launch["BLOCK_V"]),)](
        *prepared.arguments(columns),
        *(unused if x is None else x for x in (seen, initial, out, starts, last, total)),
        **prepared.constants(),
        HAS_SEEN=seen is not None,
        HAS_VALUE=not without_values,
        HAS_INITIAL=initial is not None,
        HAS_OUT=out is not None,
        HAS_STARTS=starts is not None,
        HAS_LAST=last is not None,
        HAS_TOTAL=total is not None,
        **launch,
    )


def reverse_sweep(
    prepared: PreparedOnDevice,
    grad: torch.Tensor,
    *,
    grad_initial: torch.Tensor,
    grad_last: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    x: torch.Tensor | None = None,
) -> None:
    """Carry the gradients of states back through all chunks; write what is given memory.

    Args:
        prepared: by `TritonRecurrence.prepare`.
        grad: of the output [t, H, V], its last dimension contiguous.
        grad_initial: of the first states, fp32 [N, H, K, V].
        grad_last: of the last states, fp32 [N, H, K, V]; None is zeros.
        ends, x: those of the states behind chunks [n, H, K, V] and of what tokens write [t, H, V],
            in value's dtype; both or neither.
    """
    narrow = REVERSE if prepared.keys <= 128 else REVERSE_TALL
    launch = launch_of(narrow, REVERSE_WIDE, prepared, prepared.values)
    units = prepared.tiles.sequence_count * prepared.heads
    seen, unused = prepared.seen, prepared.sums
    reverse_sweep_kernel[(units * cdiv(prepared.values, launch["BLOCK_V"]),)](
        *prepared.arguments(),
        *(grad, *grad.stride()[:2]),
        *(unused if y is None else y for y in (seen, grad_last, ends, x, grad_initial)),
        **prepared.constants(),
        HAS_SEEN=seen is not None,
        HAS_GRAD_LAST=grad_last is not None,
        STORES=ends is not None,
        **launch,
    )


def see(prepared: PreparedOnDevice) -> None:
    """Make scale (Q Kᵀ) ∘ D of all chunks at once where sweeps do not, unless it is there."""
    query, key, value = prepared.inputs[:3]
    tiles, heads = prepared.tiles, prepared.heads
    if prepared.seen is not None or not prepared.sees_ahead:
        return
    prepared.seen = value.new_empty((tiles.count, heads, tiles.size, tiles.size))
    if tiles.count:
        features = padded(prepared.keys)
        seen_kernel[(tiles.count * heads,)](
            *(query, key, prepared.sums, prepared.seen, tiles.first, tiles.end, prepared.scale),
            *(tiles.count, heads, heads // key.shape[1], prepared.keys),
            *query.stride()[:2],
            *key.stride()[:2],
            CHUNK=tiles.size,
            KEYS=features,
            PRECISION=product_precision(value),
            **SEEN.pick(value, f"{str(value.dtype)[6:]} C{tiles.size} K{features}"),
        )


def gradients(
    prepared: PreparedOnDevice,
    grad: torch.Tensor,
    *,
    starts: torch.Tensor,
    ends: torch.Tensor,
    x: torch.Tensor,
) -> RecurrenceInputs:
    """Return the gradients of the inputs.

    Args:
        prepared: by `TritonRecurrence.prepare`.
        grad: of the output [t, H, V], its last dimension contiguous.
        starts, ends, x: from `sweep` and `reverse_sweep`.
    """
    inputs, tiles = prepared.inputs, prepared.tiles
    if not tiles.count:
        return RecurrenceInputs(*map(torch.empty_like, inputs))
    launch = gradients_launch(prepared) | {"HEADS": heads_together(prepared)}
    tokens, groups, keys = inputs.key.shape
    units = prepared.heads // launch["HEADS"]
    value, decay, strength = (
        torch.empty(y.shape, dtype=y.dtype, device=y.device) for y in inputs[2:]
    )
    pair = inputs.key.new_empty((2, tokens, units, keys))  # of query and key
    recurrence_gradients_kernel[(tiles.count * units,)](
        *prepared.arguments(),
        *(grad, *grad.stride()[:2]),
        *(starts, ends, x, *pair, value, decay, strength),
        **prepared.constants(),
        VALUES=padded(prepared.values),
        ROWS=tiles.size * (2 if prepared.corrects else 1),
        **launch,
    )
    pair = pair if units == groups else sum_units(pair, groups)
    return RecurrenceInputs(*pair, value, decay, strength)


def gradients_launch(prepared: PreparedOnDevice) -> dict[str, int]:
    """Return how to start the gradients kernel."""
    sizes = (GRADIENTS, GRADIENTS_TALL)
    if not prepared.corrects:
        sizes = (GRADIENTS_DUAL, GRADIENTS_DUAL_TALL)
    narrow = sizes[prepared.keys > 128]
    return launch_of(narrow, GRADIENTS_WIDE, prepared, prepared.values)


def heads_together(prepared: PreparedOnDevice) -> int:
    """Return how many heads of a group one program of the gradients works on.

    As many as leave a large GPU enough programs. From Blackwell on it is one: tensor memory has no
    room for the accumulators of a loop.
    """
    value, shared = prepared.inputs.value, prepared.heads // prepared.inputs.key.shape[1]
    if uses_tensor_memory(value):
        return 1
    programs = prepared.tiles.count * prepared.heads
    most = min(shared, gradients_launch(prepared).get("HEADS", shared))
    fits = (n for n in range(most, 1, -1) if shared % n == 0 and programs // n >= PROGRAMS)
    return next(fits, 1)


def sum_units(parts: torch.Tensor, groups: int) -> torch.Tensor:
    """Return [2, t, G, K], the sums over the units of each group, from [2, t, units, K]."""
    _, tokens, units, keys = parts.shape
    found = parts.new_empty((2, tokens, groups, keys))
    sum_units_kernel[(2 * tokens * groups,)](
        *(parts, found, keys, units // groups),
        UNITS=next_power_of_2(units // groups),
        BLOCK=padded(keys),
        num_warps=1,
    )
    return found


def launch_of(
    narrow: Launches, wide: Launches, prepared: PreparedOnDevice, columns: int
) -> dict[str, int]:
    """Return how to start a kernel with tiles of so many columns of values.

    Args:
        narrow, wide: of 16-bit values, and of fp32 ones.
        prepared: what the kernel works on.
        columns: no tile is made wider than these need.
    """
    value = prepared.inputs.value
    kind = wide if value.dtype == torch.float32 else narrow
    key = f"{str(value.dtype)[6:]} C{prepared.tiles.size} K{padded(prepared.keys)}"
    launch = kind.pick(value, f"{key} V{padded(columns)}")
    return launch | {"BLOCK_V": min(launch["BLOCK_V"], padded(columns))}


def fp32_chunk(*, corrects: bool, keys: int) -> int:
    """Return the maximum tokens of a chunk in fp32."""
    return FP32_CHUNK_DELTA_RULE if corrects or keys > 128 else FP32_CHUNK


def product_precision(value: torch.Tensor) -> str:
    """Return how kernels multiply: fp32 by three products on tensor cores, 16 bits by one.

    Without tensor cores products of fp32 fill the registers many times over.
    """
    return "tf32x3" if value.dtype == torch.float32 else "ieee"


def dense(x: torch.Tensor) -> torch.Tensor:
    """Return x with a contiguous last dimension; slices of a wider tensor stay views."""
    return x if x.stride(-1) == 1 else x.contiguous()


def padded(features: int) -> int:
    """Return the columns of a tile that holds so many features."""
    return max(16, next_power_of_2(features))
