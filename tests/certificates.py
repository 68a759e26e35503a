"""Certificate authorities and certificates for tests, made by openssl's command line."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pagemesh.shared.settings import MeshSettings

EXTENSIONS = "subjectAltName=IP:127.0.0.1,DNS:localhost"
NEW_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"


class Identity(NamedTuple):
    """Files of somebody on the mesh: who he is, and whom he believes."""

    certfile: Path
    keyfile: Path
    cafile: Path

    def mesh(self, **others: Any) -> MeshSettings:
        return MeshSettings(
            mesh_certfile=str(self.certfile),
            mesh_keyfile=str(self.keyfile),
            mesh_cafile=str(self.cafile),
            **others,
        )

    def flags(self) -> list[str]:
        files = zip(("cert", "key", "ca"), self, strict=True)
        return [word for kind, file in files for word in (f"--mesh-{kind}file", str(file))]


class Authority:
    """A CA whose files lie in `folder`."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("openssl makes the certificates")
        folder.mkdir()
        self._folder = folder
        self.cafile = folder / "ca.pem"
        self._keyfile = folder / "ca.key"
        names = f"-subj /CN={folder.name} -addext keyUsage=critical,keyCertSign"
        self._openssl(f"req -x509 {NEW_KEY} -days 2 {names}", self._keyfile, self.cafile)

    def issue(self, name: str, *, days: int = 2, believes: Authority | None = None) -> Identity:
        """A certificate of 127.0.0.1 for servers and clients; expired already if `days` < 0."""
        keyfile, certfile = self._folder / f"{name}.key", self._folder / f"{name}.pem"
        request, extensions = self._folder / f"{name}.csr", self._folder / "extensions"
        extensions.write_text(EXTENSIONS)
        self._openssl(f"req {NEW_KEY} -subj /CN={name}", keyfile, request)
        signed = f"x509 -req -CAcreateserial -days {days} -extfile {extensions} -in {request}"
        self._openssl(f"{signed} -CA {self.cafile} -CAkey {self._keyfile}", None, certfile)
        return Identity(certfile, keyfile, (believes or self).cafile)

    def _openssl(self, command: str, keyfile: Path | None, out: Path) -> None:
        files = ["-out", str(out)] if keyfile is None else ["-keyout", keyfile, "-out", out]
        subprocess.run(["openssl", *command.split(), *files], check=True, capture_output=True)


class Certified(NamedTuple):
    """A member of the mesh, and those who look like one but are not."""

    member: Identity
    foreign: Identity
    expired: Identity


def certify(folder: Path) -> Certified:
    ours, theirs = Authority(folder / "ours"), Authority(folder / "theirs")
    return Certified(
        member=ours.issue("member"),
        foreign=theirs.issue("foreign", believes=ours),
        expired=ours.issue("expired", days=-1),
    )
