# SPDX-License-Identifier: Apache-2.0
"""Buffer reuse on a GPU: a buffer is not written by its next user before the last read."""

from __future__ import annotations

import pytest
import torch

from megatron.core.weight_gather import BufferPool


@pytest.mark.gpu
@pytest.mark.machine
def test_reused_buffer_waits_for_the_previous_stream(device):
    pool = BufferPool(device)
    compute, gather = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(gather):
        lease = pool.acquire(1 << 24, torch.float32)
        lease.fill_(1.0)
    out = torch.empty_like(lease)
    compute.wait_stream(gather)
    with torch.cuda.stream(compute):
        torch.cuda._sleep(200_000_000)
        out.copy_(lease)
        pool.release(lease)
    with torch.cuda.stream(gather):
        again = pool.acquire(1 << 24, torch.float32)
        again.fill_(2.0)
    assert again.data_ptr() == lease.data_ptr()
    torch.cuda.synchronize()
    equal = bool((out == 1.0).all())
    assert equal
