"""DNS of a test cluster: `cluster_dns.py ADDRESS PORT API_SERVER CERTIFICATES` serves UDP.

It has the addresses of `SERVICE.NAMESPACE.svc.cluster.local` and, if the Service is headless, of
`HOSTNAME.SERVICE.NAMESPACE.svc.cluster.local`. Each answer is read from the API server and has a
TTL of 0, so that pods see a change at once. Other names do not exist.
"""

from __future__ import annotations

import json
import socket
import socketserver
import ssl
import struct
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ZONE = ["svc", "cluster", "local"]
HEADLESS = "None"
HEADER = struct.Struct("!6H")  # id, flags, questions, answers, authorities, additional
RESPONSE_FLAGS = 0x8580  # a response, authoritative, recursion desired and available
NO_SUCH_NAME = 3
SERVER_FAILURE = 2
TYPE_A = 1
API_TIMEOUT_S = 5


class Api:
    def __init__(self, server: str, certificates: Path) -> None:
        self._server = server
        self._context = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
        self._context.load_cert_chain(certificates / "admin.crt", certificates / "admin.key")

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        url = f"{self._server}/api/v1/namespaces/{namespace}/{kind}/{name}"
        try:
            with urllib.request.urlopen(url, timeout=API_TIMEOUT_S, context=self._context) as reply:
                found: dict[str, Any] = json.load(reply)
                return found
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise


def addresses(api: Api, labels: list[str]) -> list[str]:
    """IPv4 addresses of a name, given as labels; empty if the name does not exist."""
    if labels[-3:] != ZONE or not 5 <= len(labels) <= 6:
        return []
    *hostname, name, namespace = labels[:-3]
    service = api.get("services", namespace, name)
    if service is None:
        return []
    address: str = service["spec"].get("clusterIP", HEADLESS)
    if address != HEADLESS:
        return [] if hostname else [address]
    endpoints = api.get("endpoints", namespace, name) or {}
    return [
        ready["ip"]
        for subset in endpoints.get("subsets", [])
        for ready in subset.get("addresses", [])
        if not hostname or ready.get("hostname") == hostname[0]
    ]


def question(query: bytes) -> tuple[list[str], int, bytes]:
    """Labels, type and raw bytes of a query's only question (RFC 1035, section 4.1.2)."""
    labels, at = [], HEADER.size
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode("ascii").lower())
        at += 1 + query[at]
    (kind,) = struct.unpack_from("!H", query, at + 1)
    return labels, kind, query[HEADER.size : at + 5]


def response(api: Api, query: bytes) -> bytes:
    labels, kind, raw = question(query)
    try:
        found = addresses(api, labels)
        code = 0 if found else NO_SUCH_NAME
    except OSError:
        found, code = [], SERVER_FAILURE
    answers = found if kind == TYPE_A else []
    query_id = int.from_bytes(query[:2], "big")
    head = HEADER.pack(query_id, RESPONSE_FLAGS | code, 1, len(answers), 0, 0)
    # 0xC00C refers to the question's name; then type A, class IN, TTL 0 and a length of 4.
    records = [struct.pack("!3HIH", 0xC00C, TYPE_A, 1, 0, 4) + socket.inet_aton(a) for a in answers]
    return head + raw + b"".join(records)


def main() -> None:
    address, port, server, certificates = sys.argv[1:]
    api = Api(server, Path(certificates))

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            query, reply_to = self.request
            reply_to.sendto(response(api, query), self.client_address)

    with socketserver.ThreadingUDPServer((address, int(port)), Handler) as resolver:
        resolver.serve_forever()


if __name__ == "__main__":
    main()
