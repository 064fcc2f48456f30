"""Block network access, so that tests depend only on local files."""

import ipaddress
import socket
from collections.abc import Callable
from typing import Any


class NetworkRefusedError(BaseException):
    """Raised if network access is refused.

    Derived from `BaseException`, because libraries would handle an `Exception` as a network failure.
    """


# Host of the dataset viewer, which `datasets` derives from the address of a mock Hub. The viewer is optional.
VIEWER = "datasets-server.127.0.0.1"
refused: list[str] = []  # Hosts of all refused connections, including those whose error was caught


def check_host(host: Any) -> None:
    """Raise `NetworkRefusedError` if a host is not this machine."""
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
        raise NetworkRefusedError(
            f"A test accesses {name} over the network. Use files or tests/helpers/hub.py instead."
        )


def refuse_network() -> None:
    """Restrict this process and its forks to connections to this machine."""

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
