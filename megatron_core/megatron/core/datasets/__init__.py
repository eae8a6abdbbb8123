# SPDX-License-Identifier: Apache-2.0
"""Training data: token files, datasets of text and of conversations, blends, and sample order.

- `indexed_dataset`: read and write `.bin/.idx` files.
- `gpt_dataset`: fixed-length samples of documents, and mock data.
- `chat_dataset`: packed conversations with a loss mask.
- `blend`: weighted blends and the train/validation/test split.
- `samplers`: sample order, microbatches and prefetching.
- `batch_sizes`: batch-size ramp-up and its division over data-parallel ranks.

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.core.datasets.batch_sizes import BatchSizes as BatchSizes
    from megatron.core.datasets.blend import BlendedDataset as BlendedDataset
    from megatron.core.datasets.blend import DataPath as DataPath
    from megatron.core.datasets.blend import build_split as build_split
    from megatron.core.datasets.blend import parse_data_path as parse_data_path
    from megatron.core.datasets.blend import parse_split as parse_split
    from megatron.core.datasets.chat_dataset import ChatDataset as ChatDataset
    from megatron.core.datasets.gpt_dataset import GPTDataset as GPTDataset
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig as GPTDatasetConfig
    from megatron.core.datasets.gpt_dataset import GPTSample as GPTSample
    from megatron.core.datasets.gpt_dataset import MockDataset as MockDataset
    from megatron.core.datasets.indexed_dataset import IndexedDataset as IndexedDataset
    from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter as IndexedDatasetWriter
    from megatron.core.datasets.samplers import CyclicOrder as CyclicOrder
    from megatron.core.datasets.samplers import GPTBatch as GPTBatch
    from megatron.core.datasets.samplers import GPTBatches as GPTBatches
    from megatron.core.datasets.samplers import PrefetchedBatches as PrefetchedBatches
    from megatron.core.datasets.samplers import SingleOrder as SingleOrder

__getattr__, __dir__, __all__ = lazy_exports(__name__)
