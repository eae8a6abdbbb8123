# SPDX-License-Identifier: Apache-2.0
"""The commands of `python -m megatron.training.checkpoint`, and readers of foreign formats."""
