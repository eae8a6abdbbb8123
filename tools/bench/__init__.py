# SPDX-License-Identifier: Apache-2.0
"""Benchmarks against peers: every figure is a ratio of two measurements taken in turns.

A benchmark is a module with `rows(quick)`, which measures and returns `table.Row`s.
"""
