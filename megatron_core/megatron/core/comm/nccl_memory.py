# SPDX-License-Identifier: Apache-2.0
"""Device memory and NCCL: buffers that communicators know, and what communicators take themselves.

A collective over a registered buffer reads and writes it directly, and needs fewer multiprocessors
than one that copies through NCCL's own buffers (*user buffer registration*). Such memory comes from
`ncclMemAlloc`, through a pool of torch's allocator, and every rank of a communicator has to use it
alike: pools that lease the same sizes in the same order do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from megatron.core.process_groups import Group

#: Ring channels of a communicator over NVLink, and connections of each: to send and to receive.
CHANNELS, CONNECTIONS = 16, 2
#: Of a connection: the buffer that NCCL_BUFFSIZE sets, and those of its low-latency protocols, LL
#: (512 KiB) and LL128 (4,800 KiB).
BUFFER_BYTES, LOW_LATENCY_BYTES = 4 << 20, (512 + 4800) << 10


def communicator_bytes(environment: Mapping[str, str]) -> int:
    """Return about how much device memory a communicator of NCCL takes, once it is used.

    channels · connections · (buffer + low-latency buffers): 0.3 GB. NCCL's documentation gives the
    default of the buffer and names the variables; the other sizes are those of NCCL 2.2x, and trees
    and NVLink SHARP take more. An estimate: torch's allocator does not see this memory.

    Args:
        environment: NCCL_BUFFSIZE and NCCL_MAX_NCHANNELS change it.
    """
    channels = min(CHANNELS, _number(environment, "NCCL_MAX_NCHANNELS", CHANNELS))
    buffer = _number(environment, "NCCL_BUFFSIZE", BUFFER_BYTES)
    return channels * CONNECTIONS * (buffer + LOW_LATENCY_BYTES)


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    """Return a variable of NCCL; the default where it is not a number, as NCCL has it."""
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else default


class RegisteredMemory:
    """Memory of NCCL's allocator that communicators have registered.

    The pool is registered while it is empty: what is allocated later, torch registers itself.

    Args:
        groups: whose collectives take the buffers; those of one rank have no communicator.
        device: where they are.

    Raises:
        ValueError: the device is no GPU, or a group has another backend than NCCL.
    """

    def __init__(self, groups: Iterable[Group], device: torch.device) -> None:
        handles = {id(g.handle): g for g in groups if g.handle is not None}
        if device.type != "cuda":
            raise ValueError(
                f"--use-nccl-ub needs NCCL, and this run computes on the {device.type}: leave it "
                "out"
            )
        backends = []
        for group in handles.values():
            assert group.handle is not None
            backend = group.handle._get_backend(device)
            if "nccl" not in backend.name().lower():
                raise ValueError(
                    f"--use-nccl-ub needs NCCL, and group {group.name} talks by {backend.name()}: "
                    "leave it out"
                )
            backends.append(backend)
        self._device = device
        self._pool = torch.cuda.MemPool(backends[0].mem_allocator) if backends else None
        for backend in backends:
            backend.register_mem_pool(self._pool)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor [numel] with no defined content."""
        if self._pool is None:
            return torch.empty(numel, dtype=dtype, device=self._device)
        with torch.cuda.use_mem_pool(self._pool, self._device):
            return torch.empty(numel, dtype=dtype, device=self._device)
