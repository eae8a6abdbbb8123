# SPDX-License-Identifier: Apache-2.0
"""Recurrent mixers with Triton kernels in the interpreter against mixers of plain torch.

`test_triton.py` runs this file in a separate process. On a CPU the ops choose the reference, so the
tests force each op to choose its kernel and count the choices.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch

from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.ops import recurrence
from megatron.core.ops.launches import Launches
from megatron.core.ops.recurrence import gated_norm as gated_rms_norm
from megatron.core.ops.recurrence import interface
from megatron.core.ops.recurrence import prologue as recurrence_prologue
from megatron.core.ops.recurrence.prologue import triton as kernels
from megatron.core.ssm import (
    GatedDeltaNetConfig,
    Mamba2Config,
    gated_delta_net,
    mamba2,
)
from tests.support.closeness import assert_all_close
from tests.support.inputs import generator
from tests.support.layers import make_mixer
from tests.support.nan_memory import nan_memory

HIDDEN = 12
DELTA = GatedDeltaNetConfig(
    num_key_heads=1, num_value_heads=2, key_channels=5, value_channels=3, conv_width=4
)
MAMBA = Mamba2Config(num_heads=4, head_channels=3, state_channels=6, num_groups=2)
MIXERS = {"delta": DELTA, "mamba": MAMBA}
#: Ops of a mixer that choose an implementation.
OPS = {
    "recurrence_prologue": recurrence_prologue,
    "recurrence": recurrence,
    "gated_rms_norm": gated_rms_norm,
}


def layouts() -> dict[str, SequenceLayout]:
    """Return layouts by name: packed documents, and documents with padding."""
    ids = torch.tensor([[0] * 2 + [1] * 7, [0] * 9])
    packed = SequenceLayout.make(SequenceSharding.of(9, 1), 0, rows=2, document_ids=ids)
    sharding = SequenceSharding.of(11, 1, cu_seqlens=[0, 3, 11], padded_cu_seqlens=[0, 6, 16])
    return {"packed": packed, "padded": SequenceLayout.make(sharding, 0, rows=1)}


def run_layer(kind: str, layout: SequenceLayout, rows: int) -> dict[str, torch.Tensor]:
    """Return the output and all gradients of a layer by name."""
    layer, store = make_mixer(MIXERS[kind], HIDDEN)
    engine = DataParallel(store, store.groups, config=DataParallelConfig(strategy="no_shard"))
    engine.begin_step()
    hidden = torch.randn(len(layout.positions), rows, HIDDEN, generator=generator(4))
    hidden.requires_grad_()
    out = layer(hidden, layout)
    out.backward(torch.randn(out.shape, generator=generator(5)))
    outputs = {"out": out.detach(), "hidden": hidden.grad}
    return outputs | {name: handle.main_grad.clone() for name, handle in store.handles.items()}


@pytest.fixture(autouse=True)
def small_launches(monkeypatch):
    """Use small tiles and chunks, as the interpreter computes whole tiles."""
    tile = {"BLOCK_T": 32, "num_warps": 1, "num_stages": 1}
    monkeypatch.setattr(kernels, "FORWARD", Launches("f", tile))
    segments = {"SEGMENTS": 8, "STEPS": 4, "AHEAD": 1, "num_warps": 1, "num_stages": 1}
    monkeypatch.setattr(kernels, "BACKWARD", Launches("b", segments))
    delta = partial(gated_delta_net.delta_recurrence, chunk_size=16)
    monkeypatch.setattr(gated_delta_net, "delta_recurrence", delta)
    state_space = partial(mamba2.state_space_recurrence, chunk_size=16)
    monkeypatch.setattr(mamba2, "state_space_recurrence", state_space)


@pytest.mark.parametrize("name", ["packed", "padded"])
@pytest.mark.parametrize("kind", MIXERS)
def test_mixer_with_kernels_matches_plain_torch(kind, name, monkeypatch):
    layout, rows = layouts()[name], 1 if name == "padded" else 2
    expected = run_layer(kind, layout, rows)
    chosen: Counter[str] = Counter()
    for op, module in OPS.items():

        def triton(implementation, tensor, *args, op=op, **kwargs):
            assert implementation is None
            chosen[op] += 1
            return "triton"

        monkeypatch.setattr(module, "choose", triton)
    in_place: list[bool] = []
    is_same_memory = interface._is_same_memory
    monkeypatch.setattr(
        interface,
        "_is_same_memory",
        lambda x, y: in_place.append(is_same_memory(x, y)) or in_place[-1],
    )
    with nan_memory():
        actual = run_layer(kind, layout, rows)
    assert chosen == dict.fromkeys(OPS, 1)
    assert in_place == [True, True]  # neither slice of the projection's gradient is copied
    assert_all_close(actual, expected)
