# SPDX-License-Identifier: Apache-2.0
"""KVCache: what was appended comes back in order, per layer; what does not fit is refused."""

import pytest
import torch

from megatron.core.inference.cache import KVCache


def test_extend_returns_all_tokens_so_far_without_moving_the_buffers() -> None:
    cache = KVCache(7)
    keys = {layer: torch.randn(7, 3, 2, 5, dtype=torch.bfloat16) for layer in (0, 4)}
    values = {layer: torch.randn(7, 3, 2, 6, dtype=torch.bfloat16) for layer in (0, 4)}
    addresses = set()
    for start, end in ((0, 4), (4, 5), (5, 7)):
        for layer in (0, 4):
            assert cache.length(layer) == start
            key, value = cache.extend(layer, keys[layer][start:end], values[layer][start:end])
            assert torch.equal(key, keys[layer][:end])
            assert torch.equal(value, values[layer][:end])
            addresses |= {key.data_ptr(), value.data_ptr()}
    assert len(addresses) == 4
    assert cache.num_bytes == 2 * 7 * 3 * 2 * (5 + 6) * 2


def test_the_cache_keeps_a_copy() -> None:
    cache = KVCache(2)
    key = torch.ones(1, 1, 1, 2)
    cache.extend(0, key, key)
    key.zero_()
    assert cache.extend(0, key, key)[0].flatten().tolist() == [1, 1, 0, 0]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity is 0"):
        KVCache(0)
    cache = KVCache(3)
    token = torch.zeros(2, 4, 2, 5)
    cache.extend(1, token, token)
    with pytest.raises(ValueError, match=r"layer 1: 2 cached \+ 2 new tokens exceed .* of 3"):
        cache.extend(1, token, token)
    other_batch = torch.zeros(1, 1, 2, 5)
    with pytest.raises(ValueError, match="one cache per batch"):
        cache.extend(1, other_batch, other_batch)
    assert cache.length(1) == 2
