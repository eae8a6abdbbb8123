# SPDX-License-Identifier: Apache-2.0
"""Preprocessing text files to token files: inputs, blocks, encoding, resumable output, progress."""
