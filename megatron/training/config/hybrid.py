# SPDX-License-Identifier: Apache-2.0
"""Layer patterns, and the shapes of the recurrent mixers that a pattern may have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.training.config.layer_pattern import is_recurrent
from megatron.training.config.values import positive, require, require_all

if TYPE_CHECKING:
    from megatron.training.config import Config


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """The layer pattern, and its gated delta nets (G) and Mamba-2 blocks (M)."""

    hybrid_layer_pattern: str | None = None
    """One symbol a block: * attention, + latent attention, G gated delta net, M Mamba-2, - MLP, E
    experts; | where pipeline stages are cut; behind each / the blocks of one depth of multi-token
    prediction. *- or *E for each layer is a GPT; any other pattern is for pretrain_hybrid."""
    linear_num_key_heads: int = 16
    """Heads of queries and keys of a gated delta net."""
    linear_num_value_heads: int = 32
    """Heads of values, states and gates of a gated delta net; several share a key head."""
    linear_key_head_dim: int = 128
    """Features of each of its query and key heads."""
    linear_value_head_dim: int = 128
    """Features of each of its value heads."""
    linear_conv_kernel_dim: int = 4
    """Tokens that its causal convolution sees."""
    mamba_num_heads: int | None = None
    """Heads of a Mamba-2 block; derived: 2 x hidden size / --mamba-head-dim."""
    mamba_head_dim: int = 64
    """Features of each of its heads."""
    mamba_state_dim: int = 128
    """Rows of each head's state, which has a column for every feature of the head."""
    mamba_num_groups: int = 8
    """Groups of its heads; those of a group share what they write to their states and read by."""
    mamba_norm_groups: int | None = None
    """Groups of features that are normalised together behind the gate; derived: --mamba-num-groups.
    """
    mamba_conv_kernel_dim: int = 4
    """Tokens that its causal convolution sees."""
    mamba_conv_bias: bool = True
    """Give that convolution a bias."""
    add_mamba_bias: bool = False
    """Give both projections of a Mamba-2 block a bias."""
    mamba_dt_limit: tuple[float, ...] | None = None
    """LEAST [MOST]: bounds of the step dt of a token; derived: 0 and none."""

    def __post_init__(self) -> None:
        limits = self.mamba_dt_limit or (0.0,)
        require_all(
            lambda: positive(self, "linear_num_key_heads", "linear_num_value_heads"),
            lambda: positive(self, "linear_key_head_dim", "linear_value_head_dim"),
            lambda: positive(self, "linear_conv_kernel_dim", "mamba_conv_kernel_dim"),
            lambda: positive(self, "mamba_num_heads", "mamba_head_dim", "mamba_state_dim"),
            lambda: positive(self, "mamba_num_groups", "mamba_norm_groups"),
            lambda: require(
                len(limits) <= 2 and 0.0 <= limits[0] <= limits[-1],
                f"--mamba-dt-limit {' '.join(map(str, limits))}: give the least dt, from 0 up, and "
                "the most or nothing",
            ),
        )


def mamba_heads(config: Config) -> int:
    """Return the heads of a Mamba-2 block, derived where they are not given."""
    hybrid = config.hybrid
    return hybrid.mamba_num_heads or 2 * config.model.hidden_size // hybrid.mamba_head_dim


def problems(config: Config) -> Iterator[str]:
    """Name what is wrong with the shapes of recurrent blocks, each with its mend."""
    # Not above: they are made of a whole config.
    from megatron.training.config.model_table import recurrent_shapes

    hybrid, parallel, width = config.hybrid, config.parallel, 2 * config.model.hidden_size
    yield from _splits(config)
    shapes = recurrent_shapes(config)
    if "Mamba-2" in shapes and hybrid.mamba_num_heads is None and width % hybrid.mamba_head_dim:
        yield (
            f"--mamba-head-dim {hybrid.mamba_head_dim} does not divide 2 x --hidden-size = "
            f"{width}: change one or give --mamba-num-heads"
        )
        return
    for name, shape in shapes.items():
        for problem in shape.problems(
            parallel.tensor_model_parallel_size,
            cp=parallel.context_parallel_size,
            mode=parallel.linear_cp_mode,
        ):
            yield f"{name}: {problem}"


def _splits(config: Config) -> Iterator[str]:
    """Name splits of sequences of which none is long enough."""
    from megatron.core.ssm.config import SEGMENTS, SPLIT_CHUNK

    parallel, length = config.parallel, config.training.seq_length
    splits, own = parallel.linear_recurrence_splits, length
    if parallel.linear_cp_mode == SEGMENTS:
        own //= parallel.context_parallel_size
    if is_recurrent(config) and splits > 1 and own <= SPLIT_CHUNK:
        each = "" if own == length else f", of which a rank runs on {own} tokens at once"
        yield (
            f"--linear-recurrence-splits {splits} has no effect with --seq-length {length}{each}: "
            f"sequences are cut at multiples of {SPLIT_CHUNK} tokens: drop it"
        )
