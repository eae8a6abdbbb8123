# SPDX-License-Identifier: Apache-2.0
"""Text generation over the engine of `megatron.core.inference`: from Python, a file or a server.

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.inference.config import Inference as Inference
    from megatron.inference.config import ModelSource as ModelSource
    from megatron.inference.config import Speculation as Speculation
    from megatron.inference.llm import LLM as LLM
    from megatron.inference.llm import TextDelta as TextDelta
    from megatron.inference.llm import TextOutput as TextOutput
    from megatron.inference.llm import TextParams as TextParams

__getattr__, __dir__, __all__ = lazy_exports(__name__)
