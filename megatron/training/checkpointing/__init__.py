# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: its saved state, the search for the newest, Hugging Face folders."""
