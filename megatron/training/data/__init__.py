# SPDX-License-Identifier: Apache-2.0
"""What a run reads: tokenizers, documents, conversations, data sets."""
