"""Routes in every spelling."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from pagemesh.gateway.admin import RoutesEndpoint
from pagemesh.gateway.admin_mesh import MeshEndpoint
from pagemesh.gateway.anthropic.endpoint import MessagesEndpoint
from pagemesh.gateway.backend import Backend
from pagemesh.gateway.docs import DocsEndpoint
from pagemesh.gateway.openai.batches import BatchesEndpoint
from pagemesh.gateway.openai.cancel import CancelEndpoint
from pagemesh.gateway.openai.chat import ChatEndpoint
from pagemesh.gateway.openai.completions import CompletionsEndpoint
from pagemesh.gateway.openai.embeddings import EmbeddingsEndpoint
from pagemesh.gateway.openai.files import FilesEndpoint
from pagemesh.gateway.openai.models import ModelsEndpoint
from pagemesh.gateway.openai.render import RenderEndpoint
from pagemesh.gateway.openai.responses.endpoint import ResponsesEndpoint
from pagemesh.gateway.openai.tokenize import TokenizeEndpoint
from pagemesh.gateway.openai.tokens_out import TokensEndpoint
from pagemesh.shared.access import Access

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
