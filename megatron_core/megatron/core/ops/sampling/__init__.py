# SPDX-License-Identifier: Apache-2.0
"""Sampling: penalties, temperature, top-k, top-p, min-p, one draw, log-probabilities.

    x = (scores - max) / temperature                       scaled scores, the best is 0
    K = {x not below the k-th largest}                     top-k, including ties with the k-th
    w = floor(2^52 softmax(x over K))                      integers, 0 outside of K
    P = the most probable tokens (lower id first on ties), until the weights before one have
        reached top_p sum(w)                               top-p (Holtzman et al. 2019, 1904.09751)
    M = {x >= log(min_p)}                                  min-p (Nguyen et al. 2024, 2407.01082)
    token = the first whose cumulative weight in P and M exceeds u times their sum

A row of temperature 0 gets its best-scored token, the lowest id on ties. Weights are integers with
exact sums, so the token depends neither on the order of the sums nor on the kernel.

The plain PyTorch version computes only filters that some row uses. The Triton kernel computes
all of it in one launch, with one program per row and without further [r, V] tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from megatron.core.ops.backend_choice import choose
from megatron.core.ops.sampling import cpu
from megatron.core.ops.sampling.cpu import ScoreChange, TokenChoice, TokenFilter

__all__ = ["ScoreChange", "TokenChoice", "TokenFilter", "change_scores_", "choose_tokens"]


def choose_tokens(
    logits: Tensor,
    scores: Tensor,
    filters: Sequence[TokenFilter],
    draws: Sequence[float],
    *,
    num_top: Sequence[int],
    implementation: str | None = None,
) -> TokenChoice:
    """Choose a token of each row and return log-probabilities.

    The host does not wait for the device.

    Args:
        logits: fp32 [r, V], from which log-probabilities are computed; not modified.
        scores: fp32 [r, V], from which tokens are chosen: the logits, or the logits after bias,
            penalties and masks.
        filters: [r].
        draws: [r] in [0, 1 - 2^-52]; unused in rows of temperature 0.
        num_top: [r], number of most probable tokens to return for each row.
        implementation: "reference", "triton" or None (by device).
    """
    by_device = implementation or not logits.is_cpu
    if by_device and choose(implementation, logits, "choose_tokens") == "triton":
        from megatron.core.ops.sampling import triton as kernels

        tokens, logprobs, finite, normalizers = kernels.choose_tokens(
            logits, scores, filters, draws
        )
        top = kernels.most_probable(logits, normalizers, num_top)
        return TokenChoice(tokens, logprobs, finite, *top)
    return cpu.choose_tokens(logits, scores, filters, draws, num_top)


def change_scores_(
    scores: Tensor, changes: Mapping[int, ScoreChange], *, implementation: str | None = None
) -> None:
    """Apply biases and penalties to some rows of the scores, in place.

    Args:
        scores: fp32 [r, V].
        changes: by row.
        implementation: "reference", "triton" or None (by device).
    """
    if not changes:
        return
    if choose(implementation, scores, "change_scores") == "triton":
        from megatron.core.ops.sampling import triton as kernels

        kernels.change_scores_(scores, changes)
    else:
        cpu.change_scores_(scores, changes)
