"""What is allowed but should be said loudly at start.

In: a Config. Out: lines of text for the log and for `laya check`. Pure; any thread.
"""

from __future__ import annotations

from laya.config.structs import Config


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address. 0.0.0.0, :: and names other than localhost are reached by others."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def notices(config: Config) -> list[str]:
    """One line for each risk that the configuration takes."""
    lines = []
    server = config.server
    if not is_loopback(server.host) and not config.auth.keys:
        lines.append(f"server.host {server.host} is reached from other machines and auth.keys is empty: anybody may call")
    if config.auth.keys and not is_loopback(server.host) and server.tls.certificate is None:
        lines.append(f"server.host {server.host} without server.tls: keys and prompts cross the network in the clear")
    if "*" in server.cors_origins:
        lines.append('server.cors_origins holds "*": every web page that a browser opens may call')
    return lines
