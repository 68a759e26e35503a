"""An obedient scripted server as a process of its own: `scripted_process.py PORT [MARK]`."""

from __future__ import annotations

import asyncio
import sys

from scripted_server import ScriptedServer


async def main(port: int) -> None:
    async with ScriptedServer().running(port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
