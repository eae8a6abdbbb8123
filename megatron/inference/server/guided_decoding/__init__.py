# SPDX-License-Identifier: Apache-2.0
"""Grammars that constrain the output of a model, and masks of the next token."""
