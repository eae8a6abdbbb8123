# SPDX-License-Identifier: Apache-2.0
"""The device of a tensor decides which implementation runs, and a captured step copies nothing."""

import pytest
import torch

from megatron.core.ops import backend_choice
from megatron.core.ops.recurrence.chunks import Chunks
from megatron.core.ops.sequences import Sequences


class TensorOnOtherGPU:
    device, dtype = torch.device("cuda", 1), torch.float32


@pytest.mark.parametrize("implementation", [None, "triton"])
def test_kernel_is_not_launched_on_another_gpu(implementation, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(backend_choice, "triton_is_installed", lambda: True)
    with pytest.raises(ValueError, match=r"on cuda:1 while cuda:0 .* torch.cuda.device\(1\)"):
        backend_choice.choose(implementation, TensorOnOtherGPU(), "gated")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert backend_choice.choose(implementation, TensorOnOtherGPU(), "gated") == "triton"


def test_tables_are_not_copied_during_graph_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    chunks = Chunks.of(Sequences([0, 3, 7], device="cuda"), 2)
    with pytest.raises(RuntimeError, match="run the step once before"):
        _ = chunks.index
