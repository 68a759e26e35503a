"""Fields beside the schema: accepted without effect, or known and refused.

A refused field may still carry the values listed with it, which ask for nothing. Null always may.
Whatever stands in neither list nor the schema is unknown: ignored, and counted.
"""

from __future__ import annotations

from typing import Any, Final

HARMLESS: Final = frozenset(
    {
        "metadata",
        "prompt_cache_retention",
        "safety_identifier",
        # The tokenizers here put none there.
        "spaces_between_special_tokens",
        "store",
    }
)

REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    "audio": (),
    "early_stopping": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "request_id": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "web_search_options": (),
}

# Fields of one endpoint that another one knows.
CHAT_REFUSED: Final = REFUSED | {"echo": (False,), "suffix": ("",)}
COMPLETION_REFUSED: Final = REFUSED | {
    "chat_template": (),
    "documents": ([],),
    "include_reasoning": (True,),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": (),
    "thinking_token_budget": (),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
}
EMBEDDING_REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "messages": (),
    "mm_processor_kwargs": (),
}
TOKENIZE_REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    "chat_template": (),
    "mm_processor_kwargs": (),
}
