# SPDX-License-Identifier: Apache-2.0
"""The self-contained library of parallel layers, data parallelism, optimizers and checkpoints.

Importing this package imports nothing else: name the module you need, for instance
`megatron.core.models.gpt` or `megatron.core.process_groups`.
"""

__version__ = "0.1.0"
