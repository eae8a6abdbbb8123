# SPDX-License-Identifier: Apache-2.0
"""The self-contained library of parallel layers, data parallelism, optimizers and checkpoints.

The names in a package's `__all__` are its public interface, for instance
`megatron.core.models.GPTModel`; the path of a module inside a package may change. Importing a
package imports little: its names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

__version__ = "0.1.0"

if TYPE_CHECKING:
    from megatron.core.backend import Backend as Backend
    from megatron.core.backend import LayerBuild as LayerBuild
    from megatron.core.device import choose_device as choose_device
    from megatron.core.initialize import InitSpec as InitSpec
    from megatron.core.process_groups import Group as Group
    from megatron.core.process_groups import ProcessGroupCollection as ProcessGroupCollection
    from megatron.core.process_groups import RankGrid as RankGrid
    from megatron.core.weight_sharding import Placement as Placement
    from megatron.core.weight_sharding import WeightSharding as WeightSharding

__getattr__, __dir__, __all__ = lazy_exports(__name__)
