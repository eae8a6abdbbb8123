# SPDX-License-Identifier: Apache-2.0
"""Training data: `.bin/.idx` token files, samples of text, of conversations and made up, blends,
and the order they are consumed in.

Name the module you need: `indexed_dataset`, `indexed_writer`, `gpt_dataset`, `chat_dataset`,
`mock_dataset`, `splits`, `division`, `samplers`, `prefetch`.
"""
