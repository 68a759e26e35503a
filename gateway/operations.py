"""What the gateway's document says of its routes: one entry for each, in one of its spellings."""

from __future__ import annotations

from typing import Final

from pagemesh.gateway.admin import RouteChanges, WholeRoute
from pagemesh.gateway.anthropic.schema import CountTokensRequest, MessagesRequest
from pagemesh.gateway.openai.cancel import AbortRequests
from pagemesh.gateway.openai.schema import (
    BatchRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    FileForm,
    GenerateRequest,
    TokenizeRequest,
)
from pagemesh.gateway.openapi import EVENTS, FORM, GENERATES, JSON, TEXT, Operation

_PAGE: Final = {
    "after": "Begin after this id",
    "limit": "Most entries",
    "order": "asc or desc, by creation",
}

_PAUSE: Final = {
    "mode": "abort ends what runs, the default; wait lets it end",
    "clear_cache": "false keeps the prefix caches; they are emptied by default",
    "wait_for_inflight_requests": "true is mode=wait",
}
_MESH: Final = tuple(
    Operation(method=method, path=f"{base}/{name}", summary=summary, answer=answer, **more)
    for base in ("/admin", "")
    for method, name, summary, answer, more in (
        (
            "GET",
            "server_info",
            "Show settings without secrets, models, and who is in the mesh",
            "What there is",
            {"refusals": (503,)},
        ),
        (
            "GET",
            "load",
            "Show what engines and services have to do",
            "Requests that run and wait, and the use of KV caches",
            {"refusals": (503,)},
        ),
        (
            "POST",
            "reset_prefix_cache",
            "Forget cached prompts that no request uses",
            "The engines that were told, by model",
            {"refusals": (404, 503), "query": {"model": "Of this model; of all without"}},
        ),
        (
            "POST",
            "pause",
            "Admit no requests, at any gateway: they wait",
            "Nothing runs any more",
            {"refusals": (400, 409, 503), "query": _PAUSE},
        ),
        ("POST", "resume", "Admit requests again", "They are", {"refusals": (409, 503)}),
        ("GET", "is_paused", "Whether requests are admitted", "is_paused, true or false", {}),
    )
)

OPERATIONS: Final = (
    *_MESH,
    Operation(
        method="POST",
        path="/v1/chat/completions",
        summary="Answer a conversation",
        request=ChatRequest,
        answer="The answer; with stream, its pieces as events, then [DONE]",
        answers=(JSON, EVENTS),
        refusals=GENERATES,
    ),
    Operation(
        method="POST",
        path="/v1/completions",
        summary="Go on with a text, or with token ids",
        request=CompletionRequest,
        answer="The text; with stream, its pieces as events, then [DONE]",
        answers=(JSON, EVENTS),
        refusals=GENERATES,
    ),
    Operation(
        method="POST",
        path="/v1/chat/completions/render",
        summary="Show the prompt that a conversation makes, and generate nothing",
        request=ChatRequest,
        answer="Its token ids and text, as a body for /inference/v1/generate",
        refusals=GENERATES,
    ),
    Operation(
        method="POST",
        path="/v1/completions/render",
        summary="Show the prompts of a completion, and generate nothing",
        request=CompletionRequest,
        answer="The token ids and text of each",
        shape="array",
        refusals=GENERATES,
    ),
    Operation(
        method="POST",
        path="/inference/v1/generate",
        summary="Go on with token ids, and answer with token ids",
        request=GenerateRequest,
        answer="The ids of each choice; with stream, its pieces as events, then [DONE]",
        answers=(JSON, EVENTS),
        refusals=GENERATES,
    ),
    Operation(
        method="POST",
        path="/v1/messages",
        summary="Answer a conversation, in Anthropic's words",
        request=MessagesRequest,
        answer="The message; with stream, its pieces as events",
        answers=(JSON, EVENTS),
        refusals=GENERATES,
        error="AnthropicError",
    ),
    Operation(
        method="POST",
        path="/v1/messages/count_tokens",
        summary="Count the tokens of such a conversation",
        request=CountTokensRequest,
        answer="The number of tokens",
        refusals=GENERATES,
        error="AnthropicError",
    ),
    Operation(
        method="POST",
        path="/v1/requests/{request_id}/cancel",
        summary="End a request, by its x-request-id or the id of its answer",
        answer="It is cancelled: its own answer is 499, or an error event",
        refusals=(404, 503),
    ),
    Operation(
        method="POST",
        path="/abort_requests",
        summary="End several requests",
        request=AbortRequests,
        answer="How many were found",
        refusals=(400, 413, 503),
    ),
    Operation(
        method="GET",
        path="/v1/models",
        summary="List what may be asked for",
        answer="Models, their further names, and routes",
        refusals=(503,),
    ),
    Operation(
        method="GET",
        path="/v1/models/{model}",
        summary="Show one model",
        answer="The model, with its longest context",
        refusals=(404, 503),
    ),
    Operation(
        method="POST",
        path="/tokenize",
        summary="Make token ids of a text, or of a conversation",
        request=TokenizeRequest,
        answer="The ids, and the token of each if asked for",
        refusals=GENERATES,
    ),
    Operation(
        method="POST",
        path="/detokenize",
        summary="Make text of token ids",
        request=DetokenizeRequest,
        answer="The text",
        refusals=GENERATES,
    ),
    Operation(
        method="POST",
        path="/v1/files",
        summary="Keep a file",
        request=FileForm,
        takes=FORM,
        answer="The file",
        refusals=(400, 413, 503),
    ),
    Operation(
        method="GET",
        path="/v1/files",
        summary="List the files of this key",
        answer="A page of files",
        refusals=(400, 503),
        query={**_PAGE, "purpose": "Only those of this purpose"},
    ),
    Operation(
        method="GET",
        path="/v1/files/{file_id}",
        summary="Show one file",
        answer="The file",
        refusals=(404, 503),
    ),
    Operation(
        method="GET",
        path="/v1/files/{file_id}/content",
        summary="Fetch what is in a file",
        answer="Its bytes",
        answers=("application/octet-stream",),
        refusals=(404, 503),
    ),
    Operation(
        method="DELETE",
        path="/v1/files/{file_id}",
        summary="Delete a file",
        answer="Its id",
        refusals=(404, 503),
    ),
    Operation(
        method="POST",
        path="/v1/batches",
        summary="Run the requests of a file when there is room",
        request=BatchRequest,
        answer="The batch",
        refusals=(400, 404, 413, 429, 503),
    ),
    Operation(
        method="GET",
        path="/v1/batches",
        summary="List the batches of this key",
        answer="A page of batches",
        refusals=(400, 503),
        query=_PAGE,
    ),
    Operation(
        method="GET",
        path="/v1/batches/{batch_id}",
        summary="Show one batch",
        answer="The batch",
        refusals=(404, 503),
    ),
    Operation(
        method="POST",
        path="/v1/batches/{batch_id}/cancel",
        summary="Stop a batch; what is answered stays",
        answer="The batch",
        refusals=(400, 404, 503),
    ),
    Operation(
        method="GET",
        path="/version",
        summary="Tell the version of the server",
        answer="The version",
    ),
    Operation(
        method="GET",
        path="/admin/routes",
        summary="List the routes: names in front of models",
        answer="Each route, with its targets and where it comes from",
    ),
    Operation(
        method="GET",
        path="/admin/routes/{name}",
        summary="Show one route",
        answer="Its targets and where it comes from",
        refusals=(404,),
    ),
    Operation(
        method="PUT",
        path="/admin/routes/{name}",
        summary="Replace the targets of a route, or make it",
        request=WholeRoute,
        answer="The route as it is now",
        refusals=(400, 409, 413, 503),
    ),
    Operation(
        method="PATCH",
        path="/admin/routes/{name}",
        summary="Change the weights of some targets; null takes one away",
        request=RouteChanges,
        answer="The route as it is now",
        refusals=(400, 409, 413, 503),
    ),
    Operation(
        method="DELETE",
        path="/admin/routes/{name}",
        summary="Take back what was set at run time",
        answer="The name",
        refusals=(400, 404, 409, 503),
    ),
    Operation(
        method="GET",
        path="/health",
        summary="Whether the process lives",
        answer="It does",
    ),
    Operation(
        method="GET",
        path="/ready",
        summary="Whether requests can be served",
        answer="They can",
        also={503: "They cannot, and why"},
    ),
    Operation(
        method="GET",
        path="/metrics",
        summary="Metrics, for Prometheus",
        answer="Series in Prometheus' text format",
        answers=(TEXT,),
        query={"name[]": "Only the families of these names"},
    ),
    Operation(
        method="GET",
        path="/openapi.json",
        summary="This document",
        answer="OpenAPI 3.1",
    ),
    Operation(
        method="GET",
        path="/docs",
        summary="This document, to be read",
        answer="A page without scripts",
        answers=("text/html",),
    ),
)
