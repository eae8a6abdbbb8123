# SPDX-License-Identifier: Apache-2.0
"""Import and export Hugging Face folders: one mapping table per architecture.

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.hf.config_json import HuggingFaceModel as HuggingFaceModel
    from megatron.hf.config_json import read_folder as read_folder
    from megatron.hf.convert import ExportConfig as ExportConfig
    from megatron.hf.convert import ImportConfig as ImportConfig
    from megatron.hf.convert import compare_logits as compare_logits
    from megatron.hf.convert import export_model as export_model
    from megatron.hf.convert import import_model as import_model
    from megatron.hf.folder import HuggingFaceFolder as HuggingFaceFolder
    from megatron.hf.folder import open_folder as open_folder

__getattr__, __dir__, __all__ = lazy_exports(__name__)
