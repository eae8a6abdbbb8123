# SPDX-License-Identifier: Apache-2.0
"""Entry points of text generation over the engine of `megatron.core.inference`."""
