# SPDX-License-Identifier: Apache-2.0
"""Training data: `.bin/.idx` token files, GPT samples, blends and the order they are consumed in.

Name the module you need: `indexed_dataset`, `indexed_writer`, `gpt_dataset`, `splits`, `samplers`.
"""
