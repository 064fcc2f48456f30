"""Refuses whatever reaches for the network, by which a test would depend on more than its files."""

import ipaddress
import socket
from collections.abc import Callable
from typing import Any


class NetworkRefusedError(BaseException):
    """Not an `Exception`: libraries take those for a network that is down, and go on without."""


# By which `datasets` asks a hub that is this machine for its viewer. It goes on without.
VIEWER = "datasets-server.127.0.0.1"
refused: list[str] = []  # hosts, also where the error was caught


def check_host(host: Any) -> None:
    """Raises `NetworkRefusedError` for a host that is not this machine."""
    name = host.decode() if isinstance(host, bytes) else str(host or "localhost")
    if name.startswith(VIEWER):
        raise socket.gaierror(f"{name} has no address")
    try:
        address = ipaddress.ip_address(name)
        is_here = address.is_loopback or address.is_unspecified
    except ValueError:
        is_here = name == "localhost"
    if not is_here:
        refused.append(name)
        raise NetworkRefusedError(f"A test reaches for {name}: let it use files, or tests/helpers/hub.py.")


def refuse_network() -> None:
    """Makes this process, and those that it forks into, find and connect to nothing but this machine."""

    def checked(connect: Callable[[socket.socket, Any], Any]) -> Callable[[socket.socket, Any], Any]:
        def connect_here(self: socket.socket, address: Any) -> Any:
            if self.family in (socket.AF_INET, socket.AF_INET6):
                check_host(address[0])
            return connect(self, address)

        return connect_here

    def getaddrinfo_here(host: Any, *args: Any, **kwargs: Any) -> Any:
        check_host(host)
        return getaddrinfo(host, *args, **kwargs)

    getaddrinfo = socket.getaddrinfo
    socket.getaddrinfo = getaddrinfo_here
    socket.socket.connect = checked(socket.socket.connect)  # type: ignore[method-assign]
    socket.socket.connect_ex = checked(socket.socket.connect_ex)  # type: ignore[method-assign]
