# SPDX-License-Identifier: Apache-2.0
"""Input data of a run: documents, conversations, vocabulary and data sets."""
