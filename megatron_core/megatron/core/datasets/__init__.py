# SPDX-License-Identifier: Apache-2.0
"""Training data: token files, datasets of text and of conversations, blends, and sample order.

Import from the module:

- `indexed_dataset`: read and write `.bin/.idx` files (`IndexedDataset`, `IndexedDatasetWriter`).
- `gpt_dataset`: fixed-length samples of documents, and mock data (`GPTDataset`, `MockDataset`).
- `chat_dataset`: packed conversations with a loss mask (`ChatDataset`).
- `blend`: weighted blends and the train/validation/test split (`BlendedDataset`, `build_split`).
- `samplers`: sample order, microbatches and prefetching (`GPTBatches`, `PrefetchedBatches`).
- `batch_sizes`: batch-size ramp-up and its division over data-parallel ranks (`BatchSizes`).
"""
