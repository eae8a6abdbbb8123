# SPDX-License-Identifier: Apache-2.0
"""NCCL and device memory: registered buffers, and an estimate of a communicator's own memory.

A collective on a registered buffer reads and writes it directly, and needs fewer SMs than a
collective that copies through NCCL's own buffers (*user buffer registration*). Registered memory
comes from `ncclMemAlloc` through a pool of torch's allocator. All ranks of a communicator must
register the same buffers, so all ranks must allocate the same sizes in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from megatron.core.process_groups import Group

#: Ring channels of a communicator over NVLink, and connections of each: to send and to receive.
CHANNELS, CONNECTIONS = 16, 2
#: Bytes of a connection: the buffer that NCCL_BUFFSIZE sets, and the buffers of the protocols LL
#: (512 KiB) and LL128 (4,800 KiB).
BUFFER_BYTES, LOW_LATENCY_BYTES = 4 << 20, (512 + 4800) << 10


def communicator_bytes(environment: Mapping[str, str]) -> int:
    """Return an estimate of the device memory of an NCCL communicator after its first use.

    channels · connections · (buffer + low-latency buffers): 0.3 GB. NCCL's documentation gives the
    default of the buffer and names the variables; the other sizes are from NCCL 2.2x. Trees and
    NVLink SHARP need more. torch's allocator does not account for this memory.

    Args:
        environment: NCCL_BUFFSIZE and NCCL_MAX_NCHANNELS change the estimate.
    """
    channels = min(CHANNELS, _number(environment, "NCCL_MAX_NCHANNELS", CHANNELS))
    buffer_bytes = _number(environment, "NCCL_BUFFSIZE", BUFFER_BYTES)
    return channels * CONNECTIONS * (buffer_bytes + LOW_LATENCY_BYTES)


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    """Return an NCCL variable; like NCCL, ignore a value that is not a number."""
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else default


class RegisteredMemory:
    """Memory from NCCL's allocator that communicators have registered.

    Args:
        groups: groups whose collectives use the buffers; a group of one rank has no communicator.
        device: device of the buffers.

    Raises:
        ValueError: the device is not a GPU, or a group's backend is not NCCL.
    """

    def __init__(self, groups: Iterable[Group], device: torch.device) -> None:
        # Groups may share a communicator, which can register a pool only once.
        handles = {id(g.handle): g for g in groups if g.handle is not None}
        if device.type != "cuda":
            raise ValueError(
                f"--use-nccl-ub needs NCCL, but this run uses {device.type}: leave it out"
            )
        backends = []
        for group in handles.values():
            assert group.handle is not None
            backend = group.handle._get_backend(device)
            if "nccl" not in backend.name().lower():
                raise ValueError(
                    f"--use-nccl-ub needs NCCL, but group {group.name} uses {backend.name()}: "
                    "leave it out"
                )
            backends.append(backend)
        self._device = device
        self._pool = torch.cuda.MemPool(backends[0].mem_allocator) if backends else None
        # Registered while empty: torch registers each later segment of the pool itself.
        for backend in backends:
            backend.register_mem_pool(self._pool)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized flat tensor [numel]."""
        if self._pool is None:
            return torch.empty(numel, dtype=dtype, device=self._device)
        # Collective registration: every rank must allocate here in the same order.
        with torch.cuda.use_mem_pool(self._pool, self._device):
            return torch.empty(numel, dtype=dtype, device=self._device)
