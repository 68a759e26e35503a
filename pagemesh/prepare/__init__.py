"""Turn any model source into the one folder that every service reads (`shared/prepared.py`)."""

from pagemesh.prepare.folder import prepare

__all__ = ["prepare"]
