"""The health check of the images: exit 0 if this container's service says that it is ready.

Usage: python ready.py PORT. With TLS on the links an inner service wants a certificate of the mesh,
its own; with TLS for clients a gateway speaks it. Nothing else is checked: it is this container.
"""

import os
import ssl
import sys
import urllib.error
import urllib.request

CLIENT_PORT = 8000


def tls_of(port: int) -> ssl.SSLContext | None:
    kind = "SSL" if port == CLIENT_PORT else "MESH"
    files = [os.environ.get(f"PAGEMESH_{kind}_{file}") for file in ("CERTFILE", "KEYFILE")]
    if not all(files):
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if kind == "MESH":
        context.load_cert_chain(*files)
    return context


def main(port: int) -> int:
    tls = tls_of(port)
    url = f"{'https' if tls else 'http'}://127.0.0.1:{port}/ready"
    try:
        urllib.request.urlopen(url, timeout=3, context=tls).close()
    except (OSError, urllib.error.URLError) as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
