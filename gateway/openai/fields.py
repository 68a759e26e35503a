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
        "service_tier",
        "store",
    }
)

REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "documents": ([],),
    "early_stopping": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "vllm_xargs": ({},),
    "web_search_options": (),
}

# Fields of one endpoint that another one knows.
CHAT_REFUSED: Final = REFUSED | {"echo": (False,)}
COMPLETION_REFUSED: Final = REFUSED | {
    "include_reasoning": (True,),
    "parallel_tool_calls": (True, False),
    "tool_choice": ("none",),
    "tools": ([],),
}
TOKENIZE_REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    name: REFUSED[name] for name in ("chat_template", "mm_processor_kwargs")
}
