# SPDX-License-Identifier: Apache-2.0
"""What `python -m megatron.training.checkpoint` does, one command a module, and foreign formats."""
