# SPDX-License-Identifier: Apache-2.0
"""Modules shared by all command-line programs: options, errors, launch and tokenizers.

They are imported by megatron.training, megatron.inference and megatron.hf, and import none of them.
"""
