# SPDX-License-Identifier: Apache-2.0
"""Measure the language of names, docstrings, comments and pages, and hold it to bounds."""
