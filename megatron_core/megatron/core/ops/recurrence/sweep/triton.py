# SPDX-License-Identifier: Apache-2.0
"""The sweeps and gradients of both recurrences in Triton: launch options and launches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from megatron.core.ops.backend_choice import uses_tensor_memory
from megatron.core.ops.launches import Launches, cdiv, next_power_of_2
from megatron.core.ops.recurrence.interface import RecurrenceInputs
from megatron.core.ops.recurrence.sweep.kernels import (
    ChunkIndices,
    recurrence_gradients_kernel,
    reverse_sweep_kernel,
    seen_kernel,
    sum_units_kernel,
    sweep_kernel,
)
from megatron.core.ops.sequences import Sequences

# With three stages the loads of the next chunk overlap with this one's products; with two they do
# not. A small BLOCK_V gives a single long sequence more programs, a large one repeats less of the
# work on keys.
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
# SSD: the sweep also computes the scores. Its products have 64 rows, which fill one warp group; two
# warp groups would duplicate most of them.
SWEEP_DUAL = Launches(
    "recurrence_sweep_dual",
    {"BLOCK_V": 64, "num_warps": 4, "num_stages": 3},
    alternatives=(
        {"BLOCK_V": 64, "num_warps": 8, "num_stages": 3},
        {"BLOCK_V": 32, "num_warps": 4, "num_stages": 3},
        {"BLOCK_V": 32, "num_warps": 4, "num_stages": 2},
    ),
)
# For K above 128, and for fp32, where each product takes three tensor-core products.
SWEEP_TALL = Launches("recurrence_sweep_tall", {"BLOCK_V": 16, "num_warps": 4, "num_stages": 2})
SWEEP_FP32 = Launches("recurrence_sweep_fp32", {"BLOCK_V": 16, "num_warps": 8, "num_stages": 1})

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
REVERSE_FP32 = Launches("recurrence_reverse_fp32", {"BLOCK_V": 16, "num_warps": 8, "num_stages": 1})
SCORES = Launches("recurrence_seen", {"num_warps": 4, "num_stages": 1})
# HEADS: the maximum heads of a group that one program processes; `sum_units_kernel` adds the sums
# of several programs. SSD keeps the sums over heads in registers. The products of the delta rule
# fill the registers, so it adds to the sums it has stored, which are still in the L2 cache.
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
# For K above 128, and for fp32: what fits in shared memory.
GRADIENTS_TALL = Launches(
    "recurrence_gradients_tall", {"BLOCK_V": 64, "num_warps": 8, "num_stages": 1}
)
# With all values in one block both warp groups would compute the same products.
GRADIENTS_DUAL_TALL = Launches(
    "recurrence_gradients_dual_tall", {"BLOCK_V": 32, "num_warps": 8, "num_stages": 1}
)
GRADIENTS_FP32 = Launches(
    "recurrence_gradients_fp32", {"BLOCK_V": 16, "num_warps": 8, "num_stages": 1}
)


# Maximum tokens of a chunk in fp32. Each operand of a product is split in three for the tensor
# cores, and longer chunks spill: the gradients of the delta rule, with their key rows, take 632
# bytes of stack with 32 tokens and 184 with 16.
FP32_CHUNK, FP32_CHUNK_DELTA_RULE = 32, 16
# Programs of the gradients kernel that keep a GPU busy: 132 to 148 processors, one or two each.
PROGRAMS = 512


@dataclass
class PreparedOnDevice:
    """State of `SweepKernels` between its operations.

    Args:
        inputs: the inputs, the last dimension of each contiguous.
        chunks: the chunks of the tokens.
        scale: factor of queries.
        decay_cumsum: fp32 [2, n, H, C], the cumulative decays a of each chunk, high and low parts.
        decayed_inverse: T ∘ D [n, H, C, C] in value's dtype; None for SSD.
        scores: scale (Q Kᵀ) ∘ D [n, H, C, C] in value's dtype, freed after the sweep; None if the
            sweep computes it.
        initial: the initial states [N, H, K, V] of the sweep, fp32; None is zeros.
        states_before: the state before each chunk [n, H, K, V] in value's dtype; None if backward
            recomputes it.
    """

    inputs: RecurrenceInputs
    chunks: ChunkIndices
    scale: float
    decay_cumsum: torch.Tensor
    decayed_inverse: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    initial: torch.Tensor | None = None
    states_before: torch.Tensor | None = None

    @property
    def delta_rule(self) -> bool:
        """Whether this is the delta rule, not SSD."""
        return self.decayed_inverse is not None

    @property
    def precomputes_scores(self) -> bool:
        """Whether `seen_kernel` computes scale (Q Kᵀ) ∘ D before a sweep, at the cost of memory.

        It shortens the sequential path of the delta rule. With K above 128 or in fp32 a sweep has
        no registers left for the product.
        """
        return self.delta_rule or self.keys > 128 or self.inputs.value.dtype == torch.float32

    @property
    def heads(self) -> int:
        """Number of heads H of values."""
        return self.inputs.value.shape[1]

    @property
    def keys(self) -> int:
        """Features K of a key."""
        return self.inputs.key.shape[2]

    @property
    def values(self) -> int:
        """Features V of a value."""
        return self.inputs.value.shape[2]

    def new_states(
        self, dtype: torch.dtype = torch.float32, count: int | None = None
    ) -> torch.Tensor:
        """Allocate `count` states [count, H, K, V]; None is one state per sequence."""
        count = self.chunks.sequence_count if count is None else count
        shape = (count, self.heads, self.keys, self.values)
        return self.inputs.value.new_empty(shape, dtype=dtype)

    def arguments(self, columns: int | None = None) -> tuple:
        """Return the leading arguments of the sweep, reverse sweep and gradients kernels, in order.

        They are query, key, value, beta, decay_cumsum, decayed_inverse; the starts, ends and
        offsets of chunks; scale; the numbers of chunks, heads, heads per group, features of keys
        and of values (`columns` replaces the latter); the strides (token, head) of query, key,
        value and beta.
        """
        query, key, value, _, beta = self.inputs
        chunks = self.chunks
        return (
            *(query, key, value, beta, self.decay_cumsum),
            self.decay_cumsum if self.decayed_inverse is None else self.decayed_inverse,
            *(chunks.starts, chunks.ends, chunks.offsets),
            self.scale,
            *(chunks.count, self.heads, self.heads // key.shape[1], self.keys),
            self.values if columns is None else columns,
            *(stride for x in (query, key, value, beta) for stride in x.stride()[:2]),
        )

    def constants(self) -> dict[str, object]:
        """Return the compile-time constants that all three kernels share."""
        return {
            "DELTA_RULE": self.delta_rule,
            "CHUNK": self.chunks.size,
            "KEYS": padded(self.keys),
            "PRECISION": product_precision(self.inputs.value),
        }


@dataclass(frozen=True)
class SweepKernels(ABC):
    """The operations of a `Recurrence` that the Triton kernels of both equations share.

    Args:
        scale: factor of queries; None is K^-0.5.
        chunk_size: tokens C of a chunk, 16, 32 or 64; in fp32 at most `fp32_chunk`.
    """

    scale: float | None
    chunk_size: int

    @abstractmethod
    def prepare(self, inputs: RecurrenceInputs, sequences: Sequences) -> PreparedOnDevice:
        """See `Recurrence`."""

    def _begin(
        self, inputs: RecurrenceInputs, sequences: Sequences, *, delta_rule: bool
    ) -> PreparedOnDevice:
        """Return the inputs, their chunks, and memory for the cumulative decays."""
        inputs = RecurrenceInputs(*map(dense, inputs[:3]), *inputs[3:])
        size, keys, heads = self.chunk_size, inputs.key.shape[-1], inputs.value.shape[1]
        if inputs.value.dtype == torch.float32:
            size = min(size, fp32_chunk(delta_rule=delta_rule, keys=keys))
        chunks = ChunkIndices.of(sequences, size)
        scale = keys**-0.5 if self.scale is None else self.scale
        shape = (2, chunks.count, heads, size)
        decay_cumsum = inputs.value.new_empty(shape, dtype=torch.float32)
        return PreparedOnDevice(inputs, chunks, scale, decay_cumsum)

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
        final_state = prepared.new_states()
        if keep_states:
            prepared.states_before = prepared.new_states(value.dtype, prepared.chunks.count)
        grid, arguments, options = sweep_launch(
            prepared,
            initial=prepared.initial,
            out=out,
            states_before=prepared.states_before,
            final_state=final_state,
        )
        sweep_kernel[grid](*arguments, **options)
        prepared.scores = None
        return out, final_state

    def summary(self, prepared: PreparedOnDevice) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Recurrence`."""
        added = prepared.new_states()
        count, heads, keys, _ = added.shape
        if prepared.delta_rule:
            transition = added.new_empty((count, heads, keys, keys))
            sweeps = {"final_state": added}, {"final_state": transition, "without_values": True}
        else:
            transition = added.new_empty((count, heads, 1, 1))
            sweeps = ({"final_state": added, "total_decay": transition},)
        for outputs in sweeps:
            grid, arguments, options = sweep_launch(prepared, **outputs)
            sweep_kernel[grid](*arguments, **options)
        return added, transition

    def state_gradient(self, prepared: PreparedOnDevice, d_out: torch.Tensor) -> torch.Tensor:
        """See `Recurrence`."""
        d_initial = prepared.new_states()
        compute_scores(prepared)
        reverse_sweep(prepared, dense(d_out), d_initial=d_initial)
        return d_initial

    def backward(
        self, prepared: PreparedOnDevice, d_out: torch.Tensor, d_final: torch.Tensor | None
    ) -> tuple[RecurrenceInputs, torch.Tensor]:
        """See `Recurrence`."""
        d_out, value = dense(d_out), prepared.inputs.value
        states_before, d_states_after = (
            prepared.states_before,
            prepared.new_states(value.dtype, prepared.chunks.count),
        )
        x = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        d_initial = prepared.new_states()
        if states_before is None:
            states_before = torch.empty_like(d_states_after)
            grid, arguments, options = sweep_launch(
                prepared, initial=prepared.initial, states_before=states_before
            )
            sweep_kernel[grid](*arguments, **options)
        compute_scores(prepared)
        d_final = None if d_final is None else d_final.float().contiguous()
        reverse_sweep(
            prepared,
            d_out,
            d_final=d_final,
            d_states_after=d_states_after,
            x=x,
            d_initial=d_initial,
        )
        prepared.scores = None
        return gradients(
            prepared, d_out, states_before=states_before, d_states_after=d_states_after, x=x
        ), d_initial


def sweep_launch(
    prepared: PreparedOnDevice,
    *,
    initial: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    states_before: torch.Tensor | None = None,
    final_state: torch.Tensor | None = None,
    total_decay: torch.Tensor | None = None,
    without_values: bool = False,
) -> tuple[tuple[int], tuple, dict[str, object]]:
    """Return (grid, arguments, options) of `sweep_kernel`, which carries states through all chunks
    and writes every output that is not None. Callers launch it: a layer is few frames from it.

    Args:
        prepared: from `SweepKernels.prepare`.
        initial: initial states, fp32 [N, H, K, V]; None is zeros.
        out: [t, H, V].
        states_before: [n, H, K, V], the state before each chunk, in value's dtype.
        final_state: fp32 [N, H, K, V]; [N, H, K, K] without values.
        total_decay: fp32 [N, H, 1, 1], exp of the sum of the decays of each sequence.
        without_values: start from the identity and skip values, so that `final_state` is M.
    """
    columns = prepared.keys if without_values else prepared.values
    launches = SWEEP if prepared.delta_rule else SWEEP_DUAL
    launches = launches if prepared.keys <= 128 else SWEEP_TALL
    launch = launch_of(launches, SWEEP_FP32, prepared, columns)
    states = prepared.chunks.sequence_count * prepared.heads
    scores, unused = prepared.scores, prepared.decay_cumsum
    tensors = (scores, initial, out, states_before, final_state, total_decay)
    arguments = (
        *prepared.arguments(columns),
        *(unused if tensor is None else tensor for tensor in tensors),
    )
    options = {
        "HAS_SCORES": scores is not None,
        "HAS_VALUE": not without_values,
        "HAS_INITIAL": initial is not None,
        "HAS_OUT": out is not None,
        "HAS_STATES": states_before is not None,
        "HAS_FINAL": final_state is not None,
        "HAS_TOTAL": total_decay is not None,
    }
    grid = (states * cdiv(columns, launch["BLOCK_V"]),)
    return grid, arguments, prepared.constants() | options | launch


def reverse_sweep(
    prepared: PreparedOnDevice,
    d_out: torch.Tensor,
    *,
    d_initial: torch.Tensor,
    d_final: torch.Tensor | None = None,
    d_states_after: torch.Tensor | None = None,
    x: torch.Tensor | None = None,
) -> None:
    """Carry the gradients of states back through all chunks, and write every output not None.

    Args:
        prepared: from `SweepKernels.prepare`.
        d_out: gradient of the output [t, H, V], its last dimension contiguous.
        d_initial: written with the gradient of the initial states, fp32 [N, H, K, V].
        d_final: gradient of the final states, fp32 [N, H, K, V]; None is zeros.
        d_states_after: written with the gradient of the state after each chunk [n, H, K, V], in
            value's dtype.
        x: written with (T ∘ D)ᵀ dv [t, H, V] in value's dtype; None if `d_states_after` is None.
    """
    launches = REVERSE if prepared.keys <= 128 else REVERSE_TALL
    launch = launch_of(launches, REVERSE_FP32, prepared, prepared.values)
    states = prepared.chunks.sequence_count * prepared.heads
    scores, unused = prepared.scores, prepared.decay_cumsum
    reverse_sweep_kernel[(states * cdiv(prepared.values, launch["BLOCK_V"]),)](
        *prepared.arguments(),
        *(d_out, *d_out.stride()[:2]),
        *(unused if y is None else y for y in (scores, d_final, d_states_after, x, d_initial)),
        **prepared.constants(),
        HAS_SCORES=scores is not None,
        HAS_D_FINAL=d_final is not None,
        STORE_GRADS=d_states_after is not None,
        **launch,
    )


def compute_scores(prepared: PreparedOnDevice) -> None:
    """Compute scale (Q Kᵀ) ∘ D of all chunks, unless the sweeps do or it is there already."""
    query, key, value = prepared.inputs[:3]
    chunks, heads = prepared.chunks, prepared.heads
    if prepared.scores is not None or not prepared.precomputes_scores:
        return
    prepared.scores = value.new_empty((chunks.count, heads, chunks.size, chunks.size))
    if chunks.count:
        features = padded(prepared.keys)
        seen_kernel[(chunks.count * heads,)](
            *(
                query,
                key,
                prepared.decay_cumsum,
                prepared.scores,
                chunks.starts,
                chunks.ends,
                prepared.scale,
            ),
            *(chunks.count, heads, heads // key.shape[1], prepared.keys),
            *query.stride()[:2],
            *key.stride()[:2],
            CHUNK=chunks.size,
            KEYS=features,
            PRECISION=product_precision(value),
            **SCORES.pick(value, f"{str(value.dtype)[6:]} C{chunks.size} K{features}"),
        )


def gradients(
    prepared: PreparedOnDevice,
    d_out: torch.Tensor,
    *,
    states_before: torch.Tensor,
    d_states_after: torch.Tensor,
    x: torch.Tensor,
) -> RecurrenceInputs:
    """Return the gradients of the inputs.

    Args:
        prepared: from `SweepKernels.prepare`.
        d_out: gradient of the output [t, H, V], its last dimension contiguous.
        states_before: from `sweep`.
        d_states_after, x: from `reverse_sweep`.
    """
    inputs, chunks = prepared.inputs, prepared.chunks
    if not chunks.count:
        return RecurrenceInputs(*map(torch.empty_like, inputs))
    launch = gradients_launch(prepared) | {"HEADS": heads_per_program(prepared)}
    tokens, groups, keys = inputs.key.shape
    units = prepared.heads // launch["HEADS"]
    d_value, d_decay, d_beta = (
        torch.empty(y.shape, dtype=y.dtype, device=y.device) for y in inputs[2:]
    )
    d_pair = inputs.key.new_empty((2, tokens, units, keys))  # of query and key
    recurrence_gradients_kernel[(chunks.count * units,)](
        *prepared.arguments(),
        *(d_out, *d_out.stride()[:2]),
        *(states_before, d_states_after, x, *d_pair, d_value, d_decay, d_beta),
        **prepared.constants(),
        VALUES=padded(prepared.values),
        ROWS=chunks.size * (2 if prepared.delta_rule else 1),
        **launch,
    )
    d_pair = d_pair if units == groups else sum_units(d_pair, groups)
    return RecurrenceInputs(*d_pair, d_value, d_decay, d_beta)


def gradients_launch(prepared: PreparedOnDevice) -> dict[str, int]:
    """Return the launch options of the gradients kernel."""
    candidates = (GRADIENTS, GRADIENTS_TALL)
    if not prepared.delta_rule:
        candidates = (GRADIENTS_DUAL, GRADIENTS_DUAL_TALL)
    launches = candidates[prepared.keys > 128]
    return launch_of(launches, GRADIENTS_FP32, prepared, prepared.values)


def heads_per_program(prepared: PreparedOnDevice) -> int:
    """Return the number of heads of a group that one program of the gradients kernel processes.

    It is the largest number that leaves a large GPU enough programs. From Blackwell on it is one:
    tensor memory has no room for the accumulators of a loop.
    """
    value, group_heads = prepared.inputs.value, prepared.heads // prepared.inputs.key.shape[1]
    if uses_tensor_memory(value):
        return 1
    programs = prepared.chunks.count * prepared.heads
    max_heads = min(group_heads, gradients_launch(prepared).get("HEADS", group_heads))
    candidates = (
        n for n in range(max_heads, 1, -1) if group_heads % n == 0 and programs // n >= PROGRAMS
    )
    return next(candidates, 1)


def sum_units(partials: torch.Tensor, groups: int) -> torch.Tensor:
    """Sum [2, t, units, K] over the units of each group, to [2, t, G, K]."""
    _, tokens, units, keys = partials.shape
    sums = partials.new_empty((2, tokens, groups, keys))
    sum_units_kernel[(2 * tokens * groups,)](
        *(partials, sums, keys, units // groups),
        UNITS=next_power_of_2(units // groups),
        BLOCK=padded(keys),
        num_warps=1,
    )
    return sums


def launch_of(
    launches_16bit: Launches, launches_fp32: Launches, prepared: PreparedOnDevice, columns: int
) -> dict[str, int]:
    """Return the launch options of a kernel that processes `columns` columns of values.

    Args:
        launches_16bit, launches_fp32: the options for 16-bit values, and for fp32.
        prepared: the arguments of the kernel.
        columns: limits BLOCK_V.
    """
    value = prepared.inputs.value
    launches = launches_fp32 if value.dtype == torch.float32 else launches_16bit
    key = f"{str(value.dtype)[6:]} C{prepared.chunks.size} K{padded(prepared.keys)}"
    launch = launches.pick(value, f"{key} V{padded(columns)}")
    return launch | {"BLOCK_V": min(launch["BLOCK_V"], padded(columns))}


def fp32_chunk(*, delta_rule: bool, keys: int) -> int:
    """Return the maximum tokens of a chunk in fp32."""
    return FP32_CHUNK_DELTA_RULE if delta_rule or keys > 128 else FP32_CHUNK


def product_precision(value: torch.Tensor) -> str:
    """Return the `input_precision` of products: fp32 takes three TF32 products, 16 bits one.

    IEEE fp32 products do not use tensor cores, and spill registers heavily.
    """
    return "tf32x3" if value.dtype == torch.float32 else "ieee"


def dense(x: torch.Tensor) -> torch.Tensor:
    """Return x with a contiguous last dimension, copied only if it has a strided one."""
    return x if x.stride(-1) == 1 else x.contiguous()


def padded(features: int) -> int:
    """Return `features` rounded up to the columns of a tile: a power of two, at least 16."""
    return max(16, next_power_of_2(features))
