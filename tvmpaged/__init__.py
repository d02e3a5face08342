"""Paged attention that its users can tune.

The public names are loaded when they are first used, so that ``import tvmpaged`` and
``tvmpaged --help`` import neither torch nor NumPy nor a compiler.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvmpaged import reference as reference
    from tvmpaged.runtime.attention import PagedAttention as PagedAttention
    from tvmpaged.runtime.block_manager import BlockManager as BlockManager
    from tvmpaged.runtime.engine import Engine as Engine
    from tvmpaged.runtime.errors import OutOfBlocksError as OutOfBlocksError
    from tvmpaged.runtime.merge_states import merge_states as merge_states
    from tvmpaged.runtime.outputs import CompletionOutput as CompletionOutput
    from tvmpaged.runtime.outputs import RequestOutput as RequestOutput
    from tvmpaged.runtime.params import BeamSearchParams as BeamSearchParams
    from tvmpaged.runtime.params import SamplingParams as SamplingParams
    from tvmpaged.spec import AttentionSpec as AttentionSpec
    from tvmpaged.spec import TargetKey as TargetKey

    __version__: str

_HOME = {
    "AttentionSpec": "tvmpaged.spec",
    "BeamSearchParams": "tvmpaged.runtime.params",
    "BlockManager": "tvmpaged.runtime.block_manager",
    "CompletionOutput": "tvmpaged.runtime.outputs",
    "Engine": "tvmpaged.runtime.engine",
    "OutOfBlocksError": "tvmpaged.runtime.errors",
    "PagedAttention": "tvmpaged.runtime.attention",
    "RequestOutput": "tvmpaged.runtime.outputs",
    "SamplingParams": "tvmpaged.runtime.params",
    "TargetKey": "tvmpaged.spec",
    "merge_states": "tvmpaged.runtime.merge_states",
}

__all__ = [
    "AttentionSpec",
    "BeamSearchParams",
    "BlockManager",
    "CompletionOutput",
    "Engine",
    "OutOfBlocksError",
    "PagedAttention",
    "RequestOutput",
    "SamplingParams",
    "TargetKey",
    "__version__",
    "merge_states",
    "reference",
]


def __getattr__(name: str) -> object:
    """Load a public name on first use and keep it."""
    if name == "__version__":
        from importlib.metadata import version

        value: object = version("tvmpaged")
    elif name == "reference":
        value = import_module("tvmpaged.reference")
    elif name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'tvmpaged' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names without loading them."""
    return sorted(set(globals()) | set(__all__))
