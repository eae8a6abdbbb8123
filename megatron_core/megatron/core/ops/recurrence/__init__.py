# SPDX-License-Identifier: Apache-2.0
"""Linear recurrences over packed tokens: the gated delta rule and state-space duality (SSD).

Both carry a state per head from token to token, and differ in the equation of a token alone. A
layer projects its tokens, `recurrence_prologue` convolves and activates them and computes gates,
`recur` runs the recurrence, `gated_rms_norm` normalises and gates its output. In generation
`recurrence_decode` does all of it for one token of each row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.core.ops.backend_choice import accumulation_dtype, choose, uses_tensor_memory
from megatron.core.ops.recurrence.convolution import causal_conv1d
from megatron.core.ops.recurrence.decode import (
    DecodeMemory,
    OutputNorm,
    causal_conv1d_decode,
    needs_arrival_counts,
    recurrence_decode,
)
from megatron.core.ops.recurrence.delta_rule.cpu import DeltaRecurrence
from megatron.core.ops.recurrence.gated_norm import GATE_FIRST, NORM_FIRST, gated_rms_norm
from megatron.core.ops.recurrence.interface import (
    CHUNK_SIZE,
    Recurrence,
    RecurrenceInputs,
    apply_transition,
    recur,
    restore_tensors,
    split_tensors,
)
from megatron.core.ops.recurrence.prologue import PrologueWeights, UnitLayout, recurrence_prologue
from megatron.core.ops.recurrence.ssd import add_skip
from megatron.core.ops.recurrence.ssd.cpu import StateSpaceDual
from megatron.core.ops.sequences import Sequences, require_sequences

__all__ = [
    "CHUNK_SIZE",
    "GATE_FIRST",
    "NORM_FIRST",
    "DecodeMemory",
    "LinearRecurrence",
    "OutputNorm",
    "PrologueWeights",
    "Recurrence",
    "RecurrenceInputs",
    "UnitLayout",
    "add_skip",
    "apply_transition",
    "causal_conv1d",
    "causal_conv1d_decode",
    "delta_recurrence",
    "gated_delta_rule",
    "gated_rms_norm",
    "needs_arrival_counts",
    "recur",
    "recurrence_decode",
    "recurrence_prologue",
    "restore_tensors",
    "split_tensors",
    "state_space_dual",
    "state_space_recurrence",
]

#: Limits of the kernels: a tile holds all features of keys, and T is solved in blocks of 16 rows.
CHUNK_SIZES = (16, 32, 64)
MAX_KEYS = 256
#: On Blackwell in 16 bits, where the gradients' accumulators must fit in tensor memory.
MAX_KEYS_IN_TENSOR_MEMORY = 128


@dataclass(frozen=True, kw_only=True)
class LinearRecurrence:
    """A recurrence: its equation, and the choice of the implementation that runs it.

    Args:
        op: the op's name, for messages.
        delta_rule: whether the equation is the delta rule, not SSD.
        scale: factor of queries of the delta rule; None is K^-0.5.
        chunk_size: tokens of a chunk.
        implementation: "reference", "triton" or None (by device and sizes).

    Raises:
        ValueError: an empty chunk.
    """

    op: str
    delta_rule: bool
    scale: float | None = None
    chunk_size: int = CHUNK_SIZE
    implementation: str | None = None

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise ValueError(f"{self.op}: chunk_size {self.chunk_size}: use 1 or more")

    def operations(self, inputs: RecurrenceInputs) -> Recurrence:
        """Return the operations of the implementation for these inputs.

        Raises:
            ValueError: an implementation that is unknown, or that does not support these inputs.
        """
        if choose(self.implementation, inputs.value, self.op) == "triton":
            problem = self._unsupported(inputs)
            if problem is None:
                return self._kernels()
            if self.implementation is not None:
                raise ValueError(
                    f"{self.op}: the Triton kernels take {problem}; use implementation='reference'"
                )
        if self.delta_rule:
            return DeltaRecurrence(self.scale, self.chunk_size)
        return StateSpaceDual(self.chunk_size)

    def _kernels(self) -> Recurrence:
        if self.delta_rule:
            from megatron.core.ops.recurrence.delta_rule.triton import DeltaRuleKernels

            return DeltaRuleKernels(self.scale, self.chunk_size)
        from megatron.core.ops.recurrence.ssd.triton import StateSpaceKernels

        return StateSpaceKernels(1.0, self.chunk_size)

    def _unsupported(self, inputs: RecurrenceInputs) -> str | None:
        """Return the limit of the kernels that these inputs exceed; None if there is none."""
        keys = inputs.key.shape[-1]
        max_keys = MAX_KEYS_IN_TENSOR_MEMORY if uses_tensor_memory(inputs.value) else MAX_KEYS
        if keys > max_keys:
            return f"keys of up to {max_keys} features, not {keys}"
        if self.chunk_size not in CHUNK_SIZES:
            sizes = ", ".join(map(str, CHUNK_SIZES[:-1]))
            return f"chunks of {sizes} or {CHUNK_SIZES[-1]} tokens, not {self.chunk_size}"
        return None


def delta_recurrence(
    scale: float | None = None, chunk_size: int = CHUNK_SIZE, *, implementation: str | None = None
) -> LinearRecurrence:
    """Return the gated delta rule for `recur`, see `LinearRecurrence`."""
    return LinearRecurrence(
        op="gated_delta_rule",
        delta_rule=True,
        scale=scale,
        chunk_size=chunk_size,
        implementation=implementation,
    )


def state_space_recurrence(
    chunk_size: int = CHUNK_SIZE, *, implementation: str | None = None
) -> LinearRecurrence:
    """Return state-space duality for `recur`, see `LinearRecurrence`."""
    return LinearRecurrence(
        op="state_space_dual",
        delta_rule=False,
        chunk_size=chunk_size,
        implementation=implementation,
    )


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    sequences: Sequences,
    initial: torch.Tensor | None = None,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the gated delta rule over sequences (Yang et al. 2024, arXiv 2412.06464, equation 10).

    Per value head, with state S [K, V], token after token:
    S <- exp(decay) S;  S <- S + key (beta (value - S^T key))^T;  out = S^T query / sqrt(K).
    Key head h serves value heads h r ... h r + r - 1, r = Hv / Hk. For another scale,
    call `recur` with the operations of a `delta_recurrence`.

    Args:
        query, key: [t, Hk, K], of length 1 (`l2norm`).
        value: [t, Hv, V].
        decay: [t, Hv], logarithms, at most 0; fp32 or wider.
        beta: [t, Hv], from 0 to 1.
        sequences: the boundaries of the t tokens.
        initial: [N, Hv, K, V], the initial states; None is zeros.
        implementation: "reference", "triton" or None (by device and sizes).

    Returns:
        (out [t, Hv, V] in value's dtype, final states [N, Hv, K, V] in fp32, or fp64 for fp64).

    Raises:
        ValueError: incompatible shapes or dtypes, or an implementation that does not support them.
    """
    inputs = RecurrenceInputs(query, key, value, decay, beta)
    recurrence = delta_recurrence(implementation=implementation)
    return _run(recurrence, inputs, sequences, initial, beta_name="beta")


def state_space_dual(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    dt: torch.Tensor,
    *,
    sequences: Sequences,
    initial: torch.Tensor | None = None,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the recurrence of Mamba-2 over sequences (Dao & Gu 2024, arXiv 2405.21060, section 6).

    Per head, with state S [K, V], token after token:
    S <- exp(decay) S + dt key value^T;  out = S^T query.
    In the paper's notation query is C, key is B, value is x, decay is dt A. Group g serves heads
    g r ... g r + r - 1, r = H / G.

    Args:
        query, key: [t, G, K].
        value: [t, H, V].
        decay: [t, H], logarithms, at most 0; fp32 or wider.
        dt: [t, H], step size of each token.
        sequences: the boundaries of the t tokens.
        initial: [N, H, K, V], the initial states; None is zeros.
        implementation: "reference", "triton" or None (by device and sizes).

    Returns:
        (out [t, H, V] in value's dtype, final states [N, H, K, V] in fp32, or fp64 for fp64).

    Raises:
        ValueError: incompatible shapes or dtypes, or an implementation that does not support them.
    """
    inputs = RecurrenceInputs(query, key, value, decay, dt)
    recurrence = state_space_recurrence(implementation=implementation)
    return _run(recurrence, inputs, sequences, initial, beta_name="dt")


def _run(
    recurrence: LinearRecurrence,
    inputs: RecurrenceInputs,
    sequences: Sequences,
    initial: torch.Tensor | None,
    *,
    beta_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check all arguments and run the recurrence; `beta_name` is the op's name for `beta`."""
    op = recurrence.op
    require_sequences(op, sequences)
    names = (*RecurrenceInputs._fields[:-1], beta_name)
    sequences.check(op, **dict(zip(names, inputs, strict=True)))
    _check_inputs(op, inputs, beta_name=beta_name)
    _check_initial(op, inputs, initial, count=sequences.count)
    return recur(recurrence.operations(inputs), inputs, sequences, initial=initial)


def _check_inputs(op: str, inputs: RecurrenceInputs, *, beta_name: str) -> None:
    """Raise ValueError unless the inputs of a recurrence have compatible shapes and dtypes.

    Args:
        op: the op's name, for the message.
        inputs: of packed tokens.
        beta_name: the op's name for `beta`.
    """
    query, key, value = inputs[:3]
    if key.ndim != 3 or query.shape != key.shape or 0 in key.shape[1:]:
        raise ValueError(
            f"{op}: query {tuple(query.shape)} and key {tuple(key.shape)} must both be "
            "(tokens, heads, features), with at least one head and one feature"
        )
    fits = value.ndim == 3 and value.shape[0] == key.shape[0]
    if not fits or 0 in value.shape[1:] or value.shape[1] % key.shape[1]:
        raise ValueError(
            f"{op}: value {tuple(value.shape)} must be (tokens, a multiple of {key.shape[1]} "
            "heads, features), with at least one feature"
        )
    for name, gate in (("decay", inputs.decay), (beta_name, inputs.beta)):
        if gate.shape != value.shape[:2]:
            raise ValueError(
                f"{op}: {name} {tuple(gate.shape)} must be {tuple(value.shape[:2])}, one "
                "number per head of value"
            )
    _check_dtypes(op, inputs, beta_name)


def _check_dtypes(op: str, inputs: RecurrenceInputs, beta_name: str) -> None:
    """Raise ValueError unless the dtypes are compatible."""
    query, key, value, decay, _ = inputs
    if not value.is_floating_point() or not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"{op}: query is {query.dtype}, key {key.dtype}, value {value.dtype}; give all three "
            "in one floating-point dtype"
        )
    dtype = accumulation_dtype(value.dtype)
    if not decay.is_floating_point() or decay.dtype != torch.promote_types(decay.dtype, dtype):
        raise ValueError(
            f"{op}: decay is {decay.dtype}; make it {dtype}, because its sums over many "
            "tokens are exponents"
        )
    if not inputs.beta.is_floating_point():
        raise ValueError(f"{op}: {beta_name} is {inputs.beta.dtype}; give a floating-point dtype")


def _check_initial(
    op: str, inputs: RecurrenceInputs, initial: torch.Tensor | None, *, count: int
) -> None:
    """Raise ValueError unless the initial states are None or [N, H, K, V]; N is `count`."""
    states = (count, inputs.value.shape[1], inputs.key.shape[2], inputs.value.shape[2])
    if initial is not None and initial.shape != states:
        raise ValueError(f"{op}: initial {tuple(initial.shape)} must be {states}")
