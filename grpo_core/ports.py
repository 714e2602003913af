"""TCP ports of this machine: which are free. Another process may take one between the question and its use."""

from __future__ import annotations

import socket


def free_port(host: str) -> int:
    """A port of `host`, one of this machine's addresses, that is free now."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


def port_is_free(host: str, port: int) -> bool:
    """Whether nobody listens there."""
    with socket.socket() as connection:
        return connection.connect_ex((host, port)) != 0
