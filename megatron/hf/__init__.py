# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders in and out: one mapping table per architecture."""
