# SPDX-License-Identifier: Apache-2.0
"""From files of text to token files: inputs, blocks, encoding, resumable output, progress."""
