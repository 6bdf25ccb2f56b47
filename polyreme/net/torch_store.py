"""The address on which a TCPStore of torch listens.

torch's store asks nobody for a secret, and its server listens on every interface, whatever host name it is given.

Invariant: a server listens only on the address of this machine at which its clients were told to find it: on loopback for
processes of one machine, on the interface between the machines for several.
"""

import socket
from typing import Any

from polyreme.errors import PolyremeError
from polyreme.net.endpoint import own_address


def narrow_stores(module: Any) -> None:
    """Makes the servers that `module` creates later, in this process and its forks, listen on one address.

    Args:
        module: a module of torch, which this package does not import, that creates its stores as `TCPStore`.
    """
    create = module.TCPStore
    if getattr(create, "polyreme_narrow", False):
        return

    def narrow(
        host_name: str, port: int, world_size: int | None = None, is_master: bool = False, *arguments: object, **keywords: object
    ) -> object:
        if not is_master or "master_listen_fd" in keywords:
            return create(host_name, port, world_size, is_master, *arguments, **keywords)
        listener = listening(host_name, port)
        keywords["master_listen_fd"] = listener.fileno()
        try:
            store = create(host_name, listener.getsockname()[1], world_size, is_master, *arguments, **keywords)
        except BaseException:
            listener.close()
            raise
        listener.detach()  # it is the store's now
        return store

    narrow.polyreme_narrow = True  # type: ignore[attr-defined]
    module.TCPStore = narrow


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens on this machine's address towards `host`. Raises PolyremeError; a restart may find the port free."""
    try:
        address = own_address(host, port or 1)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        place = socket.getaddrinfo(address, port, family, socket.SOCK_STREAM)[0][4]  # with the interface of a link-local address
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            listener.listen(1024)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise PolyremeError(
            f"a free port {port} towards {host} for torch's store", error.strerror or str(error), "Stop the process that uses it."
        ) from None
    return listener
