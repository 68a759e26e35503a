"""Types of fields whose values have limits, for the structs of bodies and so for the document.

What would not fit the mesh's messages is refused while a body is decoded. Decoding does not look at
the other limits: `params.py` and SamplingParams do, in better words. A test holds both together.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import Meta

from pagemesh.gateway.openai.messages import MAX_MESSAGES, ROLES
from pagemesh.shared.sampling import (
    MAX_BAD_WORDS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_REPETITION_PENALTY,
    MIN_REPETITION_PENALTY,
)

MAX_TEMPERATURE: Final = 2.0
MAX_TOP_LOGPROBS: Final = 20
# Of a cache salt, and of a prompt cache key.
MAX_CACHE_NAME_CHARS: Final = 256
EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
VERBOSITIES: Final = ("low", "medium", "high")
MAX_DOCUMENTS: Final = 1024
# The priority of requests that bring none: smaller values go first.
TIERS: Final = {"auto": 0, "default": 0, "scale": 0, "priority": -1, "flex": 1}
MAX_INT32: Final = 2**31 - 1


def _shown(**keywords: Any) -> Meta:
    """Keywords of JSON schema."""
    return Meta(extra_json_schema=keywords)


def _shown_int32(**keywords: Any) -> Meta:
    """As `_shown`, for an integer that has no greatest value but its width."""
    return Meta(le=MAX_INT32, extra_json_schema=keywords)


Int32 = Annotated[int, Meta(ge=-(2**31), le=MAX_INT32)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Positive = Annotated[int, _shown_int32(minimum=1)]
Count = Annotated[int, _shown_int32(minimum=0)]
TopK = Annotated[int, _shown_int32(minimum=-1)]
Choices = Annotated[int, _shown(minimum=1, maximum=MAX_N)]
Logprobs = Annotated[int, _shown(minimum=0, maximum=MAX_LOGPROBS)]
TopLogprobs = Annotated[int, _shown(minimum=0, maximum=MAX_TOP_LOGPROBS)]
Temperature = Annotated[float, _shown(minimum=0, maximum=MAX_TEMPERATURE)]
Share = Annotated[float, _shown(minimum=0, maximum=1)]
ShareAboveZero = Annotated[float, _shown(exclusiveMinimum=0, maximum=1)]
Penalty = Annotated[float, _shown(minimum=-2, maximum=2)]
RepetitionPenalty = Annotated[
    float, _shown(minimum=MIN_REPETITION_PENALTY, maximum=MAX_REPETITION_PENALTY)
]
Bias = Annotated[float, _shown(minimum=-100, maximum=100)]
Seconds = Annotated[float, _shown(exclusiveMinimum=0)]
SomeText = Annotated[str, _shown(minLength=1)]
CacheKey = Annotated[str, _shown(maxLength=MAX_CACHE_NAME_CHARS)]
CacheSalt = Annotated[str, _shown(minLength=1, maxLength=MAX_CACHE_NAME_CHARS)]
TokenId = Annotated[int, _shown(minimum=0)]
SomeTokenIds = Annotated[list[TokenId], _shown(minItems=1)]
FewTokenIds = Annotated[list[TokenId], _shown(maxItems=MAX_LOGPROB_TOKEN_IDS)]
BadWords = Annotated[list[SomeText], _shown(maxItems=MAX_BAD_WORDS)]
Truncation = Annotated[int, _shown_int32(**{"minimum": -1, "not": {"const": 0}})]
Effort = Annotated[str, _shown(enum=list(EFFORTS))]
Verbosity = Annotated[str, _shown(enum=list(VERBOSITIES))]
Tier = Annotated[str, _shown(enum=list(TIERS))]
Documents = Annotated[list[dict[str, Any]], _shown(maxItems=MAX_DOCUMENTS)]
_TEXT_PART: Final = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Message = Annotated[
    dict[str, Any],
    _shown(
        properties={
            "role": {"enum": list(ROLES)},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]},
        },
        required=["role"],
    ),
]
Messages = Annotated[list[Message], _shown(minItems=1, maxItems=MAX_MESSAGES)]
