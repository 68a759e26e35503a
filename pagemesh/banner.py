"""What a newcomer sees once the mesh is ready: the address and a request to paste."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from pagemesh.shared.settings import GatewaySettings, Settings

_WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_QUESTION: Final = "Explain in two sentences what a page table is."


def gateway_url(gateway: GatewaySettings) -> str:
    """The address of the gateway as a client on this machine writes it."""
    host = _WILDCARDS.get(gateway.host, gateway.host)
    shown = f"[{host}]" if ":" in host else host
    scheme = "http" if gateway.ssl_certfile is None else "https"
    return f"{scheme}://{shown}:{gateway.port}"


def banner(settings: Settings, model_names: Sequence[str]) -> str:
    return (
        f"\npagemesh serves {', '.join(model_names)} at {gateway_url(settings.gateway)}/v1\n\n"
        f"{_curl(settings.gateway, model_names[0])}\n"
    )


def _curl(gateway: GatewaySettings, model_name: str) -> str:
    body = {
        "model": model_name,
        "messages": [{"role": "user", "content": _QUESTION}],
        "stream": True,
    }
    lines = [f"curl -N {gateway_url(gateway)}/v1/chat/completions"]
    if gateway.ssl_certfile is not None:
        lines.append(f"--cacert {gateway.ssl_certfile}")
    if gateway.api_key:
        lines.append('-H "Authorization: Bearer $YOUR_API_KEY"')
    lines.append("-H 'Content-Type: application/json'")
    lines.append(f"-d '{json.dumps(body)}'")
    return " \\\n  ".join(lines)
