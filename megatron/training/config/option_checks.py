# SPDX-License-Identifier: Apache-2.0
"""What is wrong between the options of context parallelism and the rest of a config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.training.config.layer_pattern import has_attention

if TYPE_CHECKING:
    from megatron.training.config import Config


def problems(config: Config) -> Iterator[str]:
    """Name what cannot be cut over the context parallel ranks, each with its mend."""
    parallel, length = config.parallel, config.training.seq_length
    cp, kernel = parallel.context_parallel_size, parallel.attention_backend
    if cp == 1:
        return
    flag = f"--context-parallel-size {cp}"
    if length % (2 * cp):
        longer = -(-length // (2 * cp)) * 2 * cp
        yield (
            f"--seq-length {length} is not a multiple of 2 x {flag} = {2 * cp}, two chunks of each "
            f"sample for every rank: use {longer}, for example"
        )
    if not has_attention(config):
        return
    if kernel != "auto":
        yield (
            f"--attention-backend {kernel} has no effect with {flag}, which takes what its device "
            "has: leave it at auto"
        )
    latent = config.attention.multi_latent_attention  # names its heads itself
    some = config.model.num_attention_heads is not None
    if parallel.cp_comm_type == "a2a" and some and not latent:
        yield from _heads(config)


def _heads(config: Config) -> Iterator[str]:
    """Name heads that cannot be cut over the ranks."""
    tp, cp = config.parallel.tensor_model_parallel_size, config.parallel.context_parallel_size
    heads = config.model.num_attention_heads
    assert heads is not None
    groups = config.model.num_query_groups or heads
    shown = f" on each of {tp} tensor parallel ranks" if tp > 1 else ""
    mend = f"--context-parallel-size {cp}: use --cp-comm-type p2p"
    if heads % tp == 0 and heads // tp % cp:
        yield f"--cp-comm-type a2a: {heads // tp} heads{shown} do not divide over {mend}"
    elif (each := max(1, groups // tp)) % cp and cp % each:
        yield f"--cp-comm-type a2a: {each} query groups{shown} do not divide over {mend}"
