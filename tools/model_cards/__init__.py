# SPDX-License-Identifier: Apache-2.0
"""Pages of the supported Hugging Face models, written from measurements."""
