"""Who commands a worker: of all schedulers that would, one."""

from __future__ import annotations

from pagemesh.shared.link import Link
from pagemesh.shared.messages import Hello


class Command:
    """The scheduler that dialled with its lease commands for as long as its link lives, whatever
    Redis says meanwhile. After it comes only a lease of no older term: the highest seen wins."""

    def __init__(self) -> None:
        self.holder: Link | None = None
        self._term = 0

    def refusal(self, hello: Hello) -> str | None:
        """Why this scheduler may not command now; None when it may."""
        if hello.lease_term < self._term:
            return f"its lease, of term {hello.lease_term}, is over: {self._term} has commanded"
        holder = self.holder
        if holder is None or holder.closed or holder.name == hello.instance_id:
            return None
        return f"{holder.name} commands this worker, and its link lives"

    def join(self, link: Link) -> bool:
        """Whether `link` commands now. A scheduler that dials again has given its older link up,
        noticed here or not."""
        if self.refusal(link.peer) is not None:
            return False
        if self.holder is not None:
            self.holder.abort("its peer opened a newer link")
        self.holder, self._term = link, link.peer.lease_term
        return True

    def leave(self, link: Link) -> bool:
        """Whether `link` did command: now nobody does."""
        if self.holder is not link:
            return False
        self.holder = None
        return True
