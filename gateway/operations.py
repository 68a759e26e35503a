"""What the gateway's document says of its routes: one entry for each, in one of its spellings."""

from __future__ import annotations

from typing import Final

from pagemesh.gateway.admin import RouteChanges, WholeRoute
from pagemesh.gateway.anthropic.schema import CountTokensRequest, MessagesRequest
from pagemesh.gateway.openai.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from pagemesh.gateway.openapi import EVENTS, GENERATES, JSON, TEXT, Operation

OPERATIONS: Final = (
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
