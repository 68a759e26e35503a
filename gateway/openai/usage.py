"""Token counts of an answer, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from pagemesh.gateway.generation import Generation


def usage(generation: Generation) -> dict[str, Any]:
    """Each prompt counts once, however many choices it has."""
    prompt_tokens = generation.prompt_tokens
    completion_tokens = generation.completion_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": generation.reasoning_tokens},
    }
