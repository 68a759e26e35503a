"""Files and batches of one gateway: their routes, and the work on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from aiohttp import web

from pagemesh.gateway.app import file_routes
from pagemesh.gateway.backend import Backend
from pagemesh.gateway.batches.batch_store import BatchStore
from pagemesh.gateway.batches.file_store import FileStore, Limits
from pagemesh.gateway.batches.inner import InnerRequests
from pagemesh.gateway.batches.lines import LINE_ROOM_BYTES
from pagemesh.gateway.batches.run import Means
from pagemesh.gateway.batches.runner import BatchRunner
from pagemesh.gateway.batches.slots import Slots
from pagemesh.gateway.openai.batches import BatchesEndpoint
from pagemesh.gateway.openai.files import FilesEndpoint
from pagemesh.shared.service import Runtime
from pagemesh.shared.settings import Settings


class BatchService:
    """`routes` are those whose requests may stand in a batch."""

    def __init__(self, runtime: Runtime, backend: Backend, routes: Sequence[web.RouteDef]) -> None:
        settings = runtime.settings.gateway
        folder = files_folder(runtime.settings)
        limits = Limits(settings.max_file_bytes, settings.max_files_bytes, settings.files_ttl_s)
        means = Means(
            batches=BatchStore(folder, settings.files_ttl_s),
            files=FileStore(folder, limits),
            inner=InnerRequests(routes, settings.max_body_bytes),
            slots=Slots(backend, settings.batch_concurrency),
            pause=backend.pause,
            max_line_bytes=settings.max_body_bytes + LINE_ROOM_BYTES,
        )
        self._runner = BatchRunner(means, runtime.registry.leases, runtime.instance_id)
        self._files = FilesEndpoint(means.files)
        self._batches = BatchesEndpoint(backend, means)
        backend.metrics.batches_running.set_function(lambda: float(self._runner.n_running))

    def routes(self) -> list[web.RouteDef]:
        return file_routes(self._files, self._batches)

    async def run(self) -> None:
        """Until cancelled."""
        await self._runner.run()

    async def stop(self) -> None:
        """Other gateways go on with what is not done."""
        await self._runner.stop()


def files_folder(settings: Settings) -> Path:
    """Meshes of one user on one machine have different ports, and must not run each other's."""
    given, mesh = settings.gateway.files_dir, settings.mesh
    if given is not None:
        return Path(given).expanduser()
    name = f"files-{quote(mesh.mesh_name, safe='')}-{settings.gateway.port}"
    return Path(mesh.data_dir).expanduser() / name
