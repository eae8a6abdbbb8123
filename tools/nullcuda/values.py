# SPDX-License-Identifier: Apache-2.0
"""Plausible values for host reads of uncomputed results, where the host needs a value."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatron.core.inference.sampling import Sampled

#: Of every vocabulary, and no end of a text.
TOKEN = 5


@contextlib.contextmanager
def plausible_tokens() -> Iterator[None]:
    """Let the host read a token that a sampler could have drawn, always the same one."""
    on_host = Sampled.on_host

    def read(sampled: Sampled) -> Sampled:
        sampled_values = on_host(sampled)
        if not sampled.tokens.is_cpu:
            sampled_values.tokens.fill_(TOKEN)
            sampled_values.finite.fill_(True)
            sampled_values.logprobs.fill_(-1.0)
        return sampled_values

    Sampled.on_host = read  # type: ignore[method-assign]
    try:
        yield
    finally:
        Sampled.on_host = on_host  # type: ignore[method-assign]
