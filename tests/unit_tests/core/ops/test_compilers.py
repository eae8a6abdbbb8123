# SPDX-License-Identifier: Apache-2.0
"""A GPU run logs the compilers of its kernels and their known bugs."""

import pytest
import torch

from megatron.core.ops import backend_choice
from megatron.training.startup_report import kernels_line


@pytest.mark.parametrize(
    ("major", "triton", "ptxas", "installs"),
    [
        (9, "3.3.1", "13.3.73", []),
        (9, "3.4.0", "13.3.73", ["triton==3.7.1"]),
        (9, "3.6.0", "12.8.93", ["triton==3.7.1", "nvidia-cuda-nvcc"]),
        (9, "3.7.1", "13.1.80", ["nvidia-cuda-nvcc"]),
        (9, "3.7.1", "13.3.33", []),
        (9, "3.8.0+git1", None, []),
        (10, "3.6.0", "12.9.86", []),
        (8, "3.6.0", "12.8.93", []),
    ],
)
def test_known_compiler_bugs_name_the_version_to_install(major, triton, ptxas, installs):
    faults = backend_choice.compiler_faults(major, triton, ptxas)
    assert len(faults) == len(installs)
    for fault, requirement in zip(faults, installs, strict=True):
        assert requirement in fault
        assert triton in fault or ptxas in fault


def test_hopper_run_logs_its_compilers_and_their_bugs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(backend_choice, "triton_version", lambda: "3.6.0")
    monkeypatch.setattr(backend_choice, "ptxas_version", lambda major: {9: "12.8.93"}[major])
    line = kernels_line(torch.device("cuda", 0))
    for word in ("Triton 3.6.0", "ptxas 12.8.93", "triton==3.7.1", "TRITON_PTXAS_PATH"):
        assert word in line
    monkeypatch.setattr(backend_choice, "triton_version", lambda: "3.7.1")
    monkeypatch.setattr(backend_choice, "ptxas_version", lambda major: "13.3.73")
    assert kernels_line(torch.device("cuda", 0)) == "kernels: Triton 3.7.1, ptxas 13.3.73"
    assert kernels_line(torch.device("cpu")) is None


def test_broken_ptxas_is_a_one_line_error(monkeypatch, tmp_path):
    file = tmp_path / "ptxas"
    file.write_text("not a program")
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(file))
    with pytest.raises(ValueError, match=rf"TRITON_PTXAS_PATH is not a program.*{file}.*unset it"):
        backend_choice.ptxas_version(9)
    monkeypatch.delenv("TRITON_PTXAS_PATH")
    assert backend_choice.ptxas_version(9) is not None
