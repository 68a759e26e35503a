"""Who commands a worker: of all schedulers linked to it, one."""

from __future__ import annotations

from pagemesh.shared.link import Link


class Command:
    """The open links of schedulers. The youngest scheduler process commands, and of its links the
    newest; the others stand by."""

    def __init__(self) -> None:
        self._links: list[Link] = []

    @property
    def holder(self) -> Link | None:
        """The link that commands. `max` keeps the first of equals, so the newest stands first."""
        return max(self._links, key=lambda link: link.peer.epoch, default=None)

    def join(self, link: Link) -> None:
        """A scheduler that dials again has given its older link up, noticed here or not."""
        for other in self._links:
            if other.name == link.name:
                other.abort("its peer opened a newer link")
        self._links.insert(0, link)

    def leave(self, link: Link) -> None:
        self._links.remove(link)
