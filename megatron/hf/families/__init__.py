# SPDX-License-Identifier: Apache-2.0
"""Architectures by family, one module per group of related models."""
