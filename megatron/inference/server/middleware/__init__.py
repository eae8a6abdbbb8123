# SPDX-License-Identifier: Apache-2.0
"""What every request passes: request id, API key, limits, errors, event streams, the log."""
