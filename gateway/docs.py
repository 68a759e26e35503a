"""GET /openapi.json and /docs: what the gateway can be asked for."""

from __future__ import annotations

from importlib.metadata import version

import msgspec
from aiohttp import web

from pagemesh.gateway.docs_page import docs_page
from pagemesh.gateway.openapi import openapi_document
from pagemesh.gateway.operations import OPERATIONS
from pagemesh.shared.access import Access


class DocsEndpoint:
    """Both are made once; they are the same for whoever asks."""

    def __init__(self, access: Access) -> None:
        document = openapi_document(OPERATIONS, access, version("pagemesh"))
        self._document = msgspec.json.encode(document)
        self._page = docs_page(document)

    async def openapi(self, _: web.Request) -> web.Response:
        return web.Response(body=self._document, content_type="application/json")

    async def page(self, _: web.Request) -> web.Response:
        headers = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return web.Response(text=self._page, content_type="text/html", headers=headers)
