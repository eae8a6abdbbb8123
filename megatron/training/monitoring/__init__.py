# SPDX-License-Identifier: Apache-2.0
"""Monitoring of training runs: log line, metrics writers, profiles, curves."""
