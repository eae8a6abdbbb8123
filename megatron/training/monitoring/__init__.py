# SPDX-License-Identifier: Apache-2.0
"""What a run shows and records: log line, metrics writers, profiles, curves."""
