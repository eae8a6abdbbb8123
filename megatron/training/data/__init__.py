# SPDX-License-Identifier: Apache-2.0
"""Input of a run: documents, conversations, vocabulary and data sets."""
