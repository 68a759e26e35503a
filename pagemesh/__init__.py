"""pagemesh: an LLM serving mesh that treats the KV cache as virtual memory.

`LLM` and the rest are imported when they are first named, so that a service, which imports
this package too, loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagemesh.llm import LLM
    from pagemesh.outputs import (
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        RequestOutput,
    )
    from pagemesh.shared.pooling import PoolingParams
    from pagemesh.shared.sampling import SamplingParams
    from pagemesh.shared.structured_outputs import StructuredOutputsParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]

_HOMES = {
    "LLM": "pagemesh.llm",
    "CompletionOutput": "pagemesh.outputs",
    "EmbeddingOutput": "pagemesh.outputs",
    "EmbeddingRequestOutput": "pagemesh.outputs",
    "Logprob": "pagemesh.outputs",
    "PoolingParams": "pagemesh.shared.pooling",
    "RequestOutput": "pagemesh.outputs",
    "SamplingParams": "pagemesh.shared.sampling",
    "StructuredOutputsParams": "pagemesh.shared.structured_outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
