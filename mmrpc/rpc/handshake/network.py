"""How others reach this host, as TensorPipe will tell them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import struct

_SIOCGIFADDR = 0x8915
_VARIABLES = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def use_interface(name: str | None, host: str) -> None:
    """Makes RPC and process groups use a network interface.

    Args:
        name: The interface; None for the one that has the node's own address, if it is known
            and the environment names no other.
        host: The node's name or address in the config.
    """
    if name is None and not any(os.environ.get(variable) for variable in _VARIABLES):
        name = _interface_of(host)
    if name is not None:
        for variable in _VARIABLES:
            os.environ[variable] = name


def _interface_of(host: str) -> str | None:
    """The interface whose IPv4 address a host name or address stands for, if not loopback."""
    with contextlib.suppress(OSError, UnicodeError):
        wanted = socket.gethostbyname(host)
        for _, name in socket.if_nameindex():
            if not wanted.startswith("127.") and address_of(name) == wanted:
                return name
    return None


def address_of(interface: str) -> str | None:
    """The IPv4 address of an interface, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def advertised_address() -> str:
    """The address that TensorPipe will tell the others.

    It is that of the interface it was given, else the first one of the host's name that is
    this host's, else loopback.
    """
    interface = os.environ.get("TP_SOCKET_IFNAME")
    if interface:
        return address_of(interface) or "127.0.0.1"
    with contextlib.suppress(OSError):
        for family, *_, place in socket.getaddrinfo(
            socket.gethostname(), None, type=socket.SOCK_STREAM
        ):
            with contextlib.suppress(OSError), socket.socket(family) as probe:
                probe.bind((place[0], 0))
                return str(place[0])
    return "127.0.0.1"


def network_id() -> str:
    """Equal for two processes that reach each other by loopback: one boot, one namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        namespace = os.readlink("/proc/self/ns/net")
    except OSError:
        boot, namespace = socket.gethostname(), ""
    return hashlib.blake2b(f"{boot}\0{namespace}".encode(), digest_size=8).hexdigest()
