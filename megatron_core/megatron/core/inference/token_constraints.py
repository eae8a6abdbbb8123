# SPDX-License-Identifier: Apache-2.0
"""The constraints of a request on its next token, as the mask that sampling applies.

A request may require a minimum length, allow only some tokens, and ban token sequences. Its grammar
has a mask of its own; a token must be allowed by both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.inference.requests import EngineRequest


class TokenConstraints:
    """The mask of one request: `EngineRequest.mask` with its constraints.

    Args:
        request: request with constraints.
        vocab_size: number of token ids, V.
    """

    def __init__(self, request: EngineRequest, vocab_size: int) -> None:
        self._grammar_mask, self._min_new_tokens = request.mask, request.min_new_tokens
        self._banned_sequences = request.banned_sequences
        self._allowed = torch.ones(vocab_size, dtype=torch.bool)
        # Allowed tokens and the vocabulary do not change, so their mask is built once.
        if request.allowed_tokens:
            self._allowed.zero_()[list(request.allowed_tokens)] = True
        self._stop_tokens = list(request.stop_tokens)

    def __call__(self, tokens: Sequence[int]) -> Tensor | None:
        """Return the mask after the output `tokens`, bool [V]; None allows all tokens."""
        # A copy: sampling may still read the mask of an earlier step.
        mask = self._allowed.clone()
        # Only the last token of a sequence is banned, where the output ends with the others.
        for *prefix, token in self._banned_sequences:
            if not prefix or list(tokens[-len(prefix) :]) == prefix:
                mask[token] = False
        grammar_mask = None if self._grammar_mask is None else self._grammar_mask(tokens)
        if grammar_mask is not None:
            mask &= grammar_mask.to(mask.device)
        if len(tokens) < self._min_new_tokens:
            # Speculative decoding evaluates masks at draft positions, so the length is the length
            # of `tokens`, not of the output so far.
            longer = mask.clone()
            longer[self._stop_tokens] = False
            # A grammar that is complete allows only stop tokens.
            mask = longer if longer.any() or self._grammar_mask is None else mask
        return mask


def constrained(request: EngineRequest, vocab_size: int) -> EngineRequest:
    """Return a request whose mask applies its constraints.

    Args:
        request: the request.
        vocab_size: number of token ids.
    """
    if not (request.min_new_tokens or request.allowed_tokens or request.banned_sequences):
        return request
    return dataclasses.replace(request, mask=TokenConstraints(request, vocab_size))
