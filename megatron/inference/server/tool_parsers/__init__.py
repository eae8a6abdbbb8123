# SPDX-License-Identifier: Apache-2.0
"""Parsers of tool calls and reasoning in the output of a model."""
