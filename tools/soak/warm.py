# SPDX-License-Identifier: Apache-2.0
"""Imports all that a rank needs, once, in the server that ranks are forked from: a start then costs
tenths of a second."""

import importlib

#: torch imports its compiler when it is told to be deterministic, or not to be: more than a second.
for name in (
    "torch._dynamo",
    "torch._inductor",
    "megatron.core.datasets.indexed_dataset",
    "megatron.training.config.check",
    "megatron.training.fault_tolerance.peers",
    "megatron.training.fault_tolerance.restart",
    "megatron.training.fault_tolerance.hang_files",
    "megatron.cli.flags",
    "megatron.training.pretrain_gpt",
    "megatron.training.pretraining",
    "megatron.training.distributed_context",
    "tests.functional_tests.small_run",
    "tools.soak.slow_disk",
):
    importlib.import_module(name)
