# SPDX-License-Identifier: Apache-2.0
"""What all command-line programs share: options, errors, launch and tokenizers.

It is below megatron.training, megatron.inference and megatron.hf, and imports none of them.
"""
