"""Routes in every spelling, and what surrounds each handler."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Final

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from pagemesh.gateway.admin import RoutesEndpoint
from pagemesh.gateway.admin_mesh import MeshEndpoint
from pagemesh.gateway.anthropic.endpoint import MessagesEndpoint
from pagemesh.gateway.anthropic.errors import error_body as anthropic_body
from pagemesh.gateway.backend import Backend
from pagemesh.gateway.docs import DocsEndpoint
from pagemesh.gateway.headers import (
    CORS,
    REQUEST_ID,
    Origins,
    check_encoding,
    choose_request_id,
    common_headers,
    preflight_response,
    speaks_anthropic,
)
from pagemesh.gateway.metrics import GatewayMetrics
from pagemesh.gateway.openai.batches import BatchesEndpoint
from pagemesh.gateway.openai.cancel import CancelEndpoint
from pagemesh.gateway.openai.chat import ChatEndpoint
from pagemesh.gateway.openai.completions import CompletionsEndpoint
from pagemesh.gateway.openai.embeddings import EmbeddingsEndpoint
from pagemesh.gateway.openai.errors import error_body, error_response, from_http
from pagemesh.gateway.openai.files import FilesEndpoint
from pagemesh.gateway.openai.models import ModelsEndpoint
from pagemesh.gateway.openai.render import RenderEndpoint
from pagemesh.gateway.openai.responses.endpoint import ResponsesEndpoint
from pagemesh.gateway.openai.tokenize import TokenizeEndpoint
from pagemesh.gateway.openai.tokens_out import TokensEndpoint
from pagemesh.gateway.parting import Parting
from pagemesh.shared.access import Access
from pagemesh.shared.errors import RequestError

CLIENT_GONE: Final = 499
METHODS: Final = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
OTHER_METHOD: Final = "(other)"

log = structlog.get_logger(__name__)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def api_routes(backend: Backend, access: Access) -> list[web.RouteDef]:
    """`operations.py` describes each: a test tells of one that it leaves out."""
    models, tokens = ModelsEndpoint(backend), TokenizeEndpoint(backend)
    messages = MessagesEndpoint(backend)
    chat, completions = ChatEndpoint(backend), CompletionsEndpoint(backend)
    render = RenderEndpoint(backend, chat.job, completions.job)
    one_model = [web.get(f"{base}/models/{{model:.+}}", models.one_model) for base in ("", "/v1")]
    return [
        *_spelled("POST", "/chat/completions", chat.handle),
        *_spelled("POST", "/chat/completions/render", render.chat),
        *_spelled("POST", "/completions", completions.handle),
        *_spelled("POST", "/completions/render", render.completions),
        *_slashed("POST", "/inference/v1/generate", TokensEndpoint(backend).handle),
        *_spelled("POST", "/messages", messages.create),
        *_spelled("POST", "/messages/count_tokens", messages.count_tokens),
        *_cancel_routes(backend, access),
        *_spelled("POST", "/embeddings", EmbeddingsEndpoint(backend).handle),
        *_spelled("GET", "/models", models.list_models),
        *one_model,
        *_spelled("POST", "/tokenize", tokens.tokenize),
        *_spelled("POST", "/detokenize", tokens.detokenize),
        *_spelled("GET", "/version", models.show_version),
        *_admin_routes(backend),
        *_docs_routes(access),
    ]


def file_routes(files: FilesEndpoint, batches: BatchesEndpoint) -> list[web.RouteDef]:
    return [
        *_spelled("POST", "/files", files.create),
        *_spelled("GET", "/files", files.list_files),
        *_spelled("GET", "/files/{file_id}", files.retrieve),
        *_spelled("GET", "/files/{file_id}/content", files.content),
        *_spelled("DELETE", "/files/{file_id}", files.delete),
        *_spelled("POST", "/batches", batches.create),
        *_spelled("GET", "/batches", batches.list_batches),
        *_spelled("GET", "/batches/{batch_id}", batches.retrieve),
        *_spelled("POST", "/batches/{batch_id}/cancel", batches.cancel),
    ]


def responses_routes(responses: ResponsesEndpoint) -> list[web.RouteDef]:
    one = "/responses/{id}"
    return [
        *_spelled("POST", "/responses", responses.create),
        *_spelled("GET", one, responses.retrieve),
        *_spelled("DELETE", one, responses.delete),
        *_spelled("POST", f"{one}/cancel", responses.cancel),
        *_spelled("GET", f"{one}/input_items", responses.input_items),
    ]


def _cancel_routes(backend: Backend, access: Access) -> list[web.RouteDef]:
    cancel = CancelEndpoint(backend.cancellations, access)
    return [
        *_spelled("POST", "/requests/{request_id}/cancel", cancel.cancel),
        *_slashed("POST", "/abort_requests", cancel.abort),
    ]


def _docs_routes(access: Access) -> list[web.RouteDef]:
    docs = DocsEndpoint(access)
    served = (("/openapi.json", docs.openapi), ("/docs", docs.page))
    return [web.get(f"{path}{slash}", handler) for path, handler in served for slash in ("", "/")]


def _admin_routes(backend: Backend) -> list[web.RouteDef]:
    """`shared/access.py` closes them to all but administrators."""
    routes = RoutesEndpoint(backend)
    one = "/admin/routes/{name:.+}"
    return [
        web.get("/admin/routes", routes.list_routes),
        web.get("/admin/routes/", routes.list_routes),
        web.get(one, routes.show),
        web.put(one, routes.put),
        web.patch(one, routes.patch),
        web.delete(one, routes.delete),
    ]


def mesh_routes(mesh: MeshEndpoint) -> list[web.RouteDef]:
    """Under /admin, and as vLLM calls them: `shared/access.py` closes both."""
    served = (
        ("GET", "/server_info", mesh.server_info),
        ("GET", "/load", mesh.load),
        ("POST", "/reset_prefix_cache", mesh.reset_prefix_cache),
        ("POST", "/pause", mesh.pause),
        ("POST", "/resume", mesh.resume),
        ("GET", "/is_paused", mesh.is_paused),
    )
    return [
        route
        for method, path, handler in served
        for base in ("", "/admin")
        for route in _slashed(method, base + path, handler)
    ]


def _spelled(method: str, path: str, handler: _Handler) -> list[web.RouteDef]:
    """With and without /v1, with and without a trailing slash: clients join URLs in every way."""
    return [*_slashed(method, path, handler), *_slashed(method, f"/v1{path}", handler)]


def _slashed(method: str, path: str, handler: _Handler) -> list[web.RouteDef]:
    return [web.route(method, path, handler), web.route(method, f"{path}/", handler)]


def counting(metrics: GatewayMetrics, parting: Parting) -> Middleware:
    """Count what every request was answered with, hang-ups too; tell `parting` of them all."""

    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        status, began_s = CLIENT_GONE, time.monotonic()
        parting.asked(request)
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            method = request.method if request.method in METHODS else OTHER_METHOD
            elapsed_s = time.monotonic() - began_s
            metrics.answered(method, _route_name(request), status, elapsed_s)
            parting.answered(request)

    return count


def _route_name(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return "(unmatched)" if resource is None else resource.canonical


def identifying(origins: Origins) -> Middleware:
    """Give each request its id, and the headers that every answer carries to the answer."""

    @web.middleware
    async def identify(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = choose_request_id(request)
        request[CORS] = origins.headers(request.headers.get("Origin"))
        response = await handler(request)
        if not response.prepared:
            response.headers.update(common_headers(request))
        return response

    return identify


@web.middleware
async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """OPTIONS needs no key and no route of its own."""
    if request.method == "OPTIONS":
        return preflight_response(request)
    return await handler(request)


@web.middleware
async def word_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure in the shape of its API. A bug costs its own request and is logged."""
    try:
        check_encoding(request)
        return await handler(request)
    except RequestError as error:
        return _refusal(request, error)
    except (ConnectionError, web.RequestPayloadError) as error:
        return _refusal(request, RequestError(f"The body could not be read: {error}"))
    except web.HTTPException as error:
        refusal = _refusal(request, from_http(error, request.method, request.path))
        if "Allow" in error.headers:
            refusal.headers["Allow"] = error.headers["Allow"]
        return refusal
    except Exception:
        log.exception("request_failed", x_request_id=request[REQUEST_ID], path=request.path)
        return _refusal(request, RequestError("Internal error", status=500))


def _refusal(request: web.Request, error: RequestError) -> web.Response:
    return error_response(error, anthropic_body if speaks_anthropic(request) else error_body)
