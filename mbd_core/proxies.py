"""Proxies of the environment. Our own addresses are asked directly, and a failed request to others names its proxy.

`http_proxy`, `https_proxy` and `all_proxy`, in small letters or capitals, send requests to a proxy. `no_proxy` lists
the hosts that are asked directly; if it lacks loopback, most libraries ask the proxy for loopback too.
"""

import ipaddress
import os
import socket
from collections.abc import Iterable, Iterator
from functools import cache
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass

LOOPBACK = ("localhost", "127.0.0.1", "::1")
DIRECT = ("no_proxy", "NO_PROXY")


def keep_direct(hosts: Iterable[str] = ()) -> None:
    """Let this process and its children ask `hosts`, loopback and this machine without a proxy, whatever library asks.

    These are added to `no_proxy`. Without a proxy in the environment nothing changes.
    """
    listed = [host.strip() for name in DIRECT for host in os.environ.get(name, "").split(",")]
    if not getproxies_environment().keys() - {"no"} or "*" in listed:
        return
    direct = dict.fromkeys([*filter(None, listed), *LOOPBACK, *sorted(_own_addresses()), *hosts])
    os.environ.update(dict.fromkeys(DIRECT, ",".join(direct)))


def is_own(url: str) -> bool:
    """Whether the host of a URL is loopback or this machine."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost") or host in _own_addresses()
    return address.is_loopback or address.is_unspecified or host in _own_addresses()


@cache
def _own_addresses() -> frozenset[str]:
    """This machine's name and its IPv4 addresses. Some clients cannot read other forms in `no_proxy`."""
    import psutil  # imported here: only where there is a proxy, or a URL to judge

    addresses = [address for interface in psutil.net_if_addrs().values() for address in interface]
    own = {address.address for address in addresses if address.family == socket.AF_INET}
    return frozenset(own | {socket.gethostname().lower()} - {""})


def proxy_note(url: str, *, takes_all: bool = True) -> str:
    """The end of a sentence on a failed request: it names the variable whose proxy was used; empty without a proxy.

    `takes_all`: the client honours `all_proxy`. A password in the variable is not shown.
    """
    parts = urlsplit(url)
    if is_own(url) or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return ""
    kinds, proxies = [parts.scheme, *(["all"] if takes_all else [])], getproxies_environment()
    kind = next((kind for kind in kinds if kind in proxies), None)
    if kind is None:
        return ""
    name = next(
        name for name in (f"{kind}_proxy", *os.environ) if name.lower() == f"{kind}_proxy" and name in os.environ
    )
    return (
        f"; it was asked through the proxy of {name}={_without_password(proxies[kind])}: correct {name}, or add "
        f"{parts.hostname} to no_proxy"
    )


def connection_note(error: BaseException, url: str) -> str:
    """`proxy_note` for a library's error, if a connection failed; empty otherwise."""
    is_connection = any(
        isinstance(cause, ConnectionError | TimeoutError)
        or "Connect" in type(cause).__name__
        or "Proxy" in repr(cause)
        for cause in _causes(error)
    )
    return proxy_note(url) if is_connection else ""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _without_password(proxy: str) -> str:
    user, at, place = proxy.rpartition("@")
    scheme, colons, _ = user.rpartition("://")
    return f"{scheme}{colons}***@{place}" if at else proxy
