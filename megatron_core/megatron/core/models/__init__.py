# SPDX-License-Identifier: Apache-2.0
"""Models: one decoder built from a layer pattern, and presets of it."""
