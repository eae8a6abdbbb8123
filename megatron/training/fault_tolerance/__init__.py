# SPDX-License-Identifier: Apache-2.0
"""Early stops of a run, and detection and handling of failed ranks and anomalous steps."""
