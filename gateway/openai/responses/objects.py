"""The response object: as it begins, and as it ends. Pure."""

from __future__ import annotations

from typing import Any, Final

from pagemesh.gateway.generation import Generation
from pagemesh.gateway.openai.answer import Job
from pagemesh.gateway.openai.responses.items import Item
from pagemesh.gateway.openai.responses.schema import ReasoningOptions, ResponseRequest, TextOptions
from pagemesh.shared.errors import RequestError

Object = dict[str, Any]
QUEUED: Final = "queued"
IN_PROGRESS: Final = "in_progress"
COMPLETED: Final = "completed"
INCOMPLETE: Final = "incomplete"
CANCELLED: Final = "cancelled"
FAILED: Final = "failed"
ACTIVE: Final = (QUEUED, IN_PROGRESS)


def begun(body: ResponseRequest, job: Job, *, store: bool) -> Object:
    """What was asked for, with the values in force where none was given."""
    text, reasoning = body.text or TextOptions(), body.reasoning or ReasoningOptions()
    return {
        "id": job.id,
        "object": "response",
        "created_at": job.created_s,
        "status": QUEUED if body.background else IN_PROGRESS,
        "background": bool(body.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": job.served.name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": job.echoes.get("service_tier", "default"),
        "store": store,
        "temperature": job.params.temperature,
        "text": {
            "format": text.format or {"type": "text"},
            "verbosity": text.verbosity or "medium",
        },
        "tool_choice": body.tool_choice or "auto",
        "tools": [{"strict": None, "parameters": None} | tool for tool in body.tools or []],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": job.params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def ended(
    begun: Object, output: list[Item], generation: Generation, *, cut_off: bool, at_s: float
) -> Object:
    """`cut_off`: the limit of tokens ended it."""
    return begun | {
        "status": INCOMPLETE if cut_off else COMPLETED,
        "completed_at": None if cut_off else int(at_s),
        "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
        "output": output,
        "usage": usage(generation),
    }


def failed(begun: Object, error: RequestError) -> Object:
    """What it had said by then is left out: nobody may build upon it."""
    return begun | {"status": FAILED, "error": {"code": _code(error), "message": error.message}}


def cancelled(begun: Object) -> Object:
    return begun | {"status": CANCELLED}


def _code(error: RequestError) -> str:
    """Of the few that OpenAI's clients know."""
    if error.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if error.status >= 500 else "invalid_prompt"


def usage(generation: Generation) -> dict[str, Any]:
    input_tokens, output_tokens = generation.prompt_tokens, generation.completion_tokens
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {
            "cached_tokens": generation.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": generation.reasoning_tokens},
        "total_tokens": input_tokens + output_tokens,
    }
