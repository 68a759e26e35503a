"""TLS of a service: towards clients (the gateway's), and on the links between services.

Links are mutual: each side shows a certificate, and believes whatever the CA of the settings
vouches for. Instances come and go at addresses that no certificate could foresee, so host names are
not compared: the CA must be the mesh's own, and a certificate from it makes a member of the mesh.
All ends of a link are ours, so TLS 1.3 is the oldest version they speak.
"""

from __future__ import annotations

import errno
import ssl
import time
from typing import Final

import aiohttp
import structlog

from pagemesh.shared.errors import StartupError
from pagemesh.shared.settings import GatewaySettings, MeshSettings

FILES: Final = "--mesh-certfile, --mesh-keyfile and --mesh-cafile"
# A stranger may knock all day; one line in so long says so.
SAY_AGAIN_S: Final = 60.0

log = structlog.get_logger(__name__)


def client_facing_context(gateway: GatewaySettings) -> ssl.SSLContext | None:
    """None without certificate. Raises StartupError when the files will not do."""
    if gateway.ssl_certfile is None or gateway.ssl_keyfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    _load_chain(context, gateway.ssl_certfile, gateway.ssl_keyfile)
    return context


def listening_context(mesh: MeshSettings) -> ssl.SSLContext | None:
    """Of a service that is dialled. Nobody without a certificate gets an answer, and the log says
    why. None without certificate. Raises StartupError when the files will not do."""
    context = _link_context(mesh, ssl.PROTOCOL_TLS_SERVER)
    if context is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.sslobject_class = _telling_of_refusals()
    return context


def dialling_context(mesh: MeshSettings) -> ssl.SSLContext | None:
    """Of a service that dials. None without certificate. Raises StartupError when the files will
    not do."""
    return _link_context(mesh, ssl.PROTOCOL_TLS_CLIENT)


def _link_context(mesh: MeshSettings, protocol: int) -> ssl.SSLContext | None:
    if mesh.mesh_certfile is None or mesh.mesh_keyfile is None or mesh.mesh_cafile is None:
        return None
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    _load_chain(context, mesh.mesh_certfile, mesh.mesh_keyfile)
    try:
        context.load_verify_locations(mesh.mesh_cafile)
    except OSError as error:  # ssl.SSLError is one too
        raise StartupError(f"cannot use the TLS file {mesh.mesh_cafile}: {error}") from error
    return context


def _load_chain(context: ssl.SSLContext, certfile: str, keyfile: str) -> None:
    def no_password() -> str:
        # OpenSSL would ask for it at a terminal, which a service does not have.
        raise StartupError(f"the TLS key {keyfile} is encrypted: give one without a password")

    try:
        context.load_cert_chain(certfile, keyfile, no_password)
    except OSError as error:
        raise StartupError(f"cannot use the TLS files {certfile} and {keyfile}: {error}") from error


def why_not_linked(error: BaseException, *, tls: bool) -> str | None:
    """Why a link could not be dialled, if TLS is a likely cause; None if it is not."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not one of --mesh-cafile: {_verdict(error.certificate_error)}"
    if isinstance(error, aiohttp.ClientSSLError):
        return f"it does not speak TLS as we do: give every service {FILES} ({error.os_error})"
    if not _is_hang_up(error):
        return None
    if tls:
        return "it hung up: our --mesh-certfile may have expired, or be of another --mesh-cafile"
    return f"it hung up: it may want TLS ({FILES})"


def _is_hang_up(error: BaseException) -> bool:
    is_reset = isinstance(error, OSError) and error.errno == errno.ECONNRESET
    return is_reset or isinstance(error, aiohttp.ServerDisconnectedError)


def _telling_of_refusals() -> type[ssl.SSLObject]:
    """Sides of connections whose failed handshakes are logged: event loops drop them silently."""
    last_s: dict[str, float] = {}

    def tell(error: ssl.SSLError) -> None:
        reason = _refusal(error)
        now_s = time.monotonic()
        if now_s - last_s.get(reason, -SAY_AGAIN_S) >= SAY_AGAIN_S:
            last_s[reason] = now_s
            log.warning("tls_refused", reason=reason)

    class Telling(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as error:
                tell(error)
                raise

    return Telling


def _refusal(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"a peer's certificate is not one of --mesh-cafile: {_verdict(error)}"
    if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "a peer showed no certificate: it needs --mesh-certfile and --mesh-keyfile"
    if error.reason == "HTTP_REQUEST":
        return f"a peer spoke plain text: it needs {FILES}"
    return f"a TLS handshake failed: {error.reason}"


def _verdict(error: Exception) -> str:
    return str(getattr(error, "verify_message", error))
