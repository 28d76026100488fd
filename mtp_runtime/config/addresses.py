"""Addresses as people write them. Pure."""

import re
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

Number = IPv4Address | IPv6Address | None
DOCUMENTATION = [ip_network(net) for net in ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32")]
# A name whose last part is a number would be taken for an IPv4 address.
_NUMERIC = re.compile(r"(.*\.)?[0-9]+")


def number_of(address: str) -> Number:
    """The IP address that a program would bind to; None for a name. Old spellings (0, 127.1) count too."""
    try:
        found = ip_address(address)
    except ValueError:
        try:
            return IPv4Address(socket.inet_aton(address))
        except OSError:
            return None
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return mapped or found


def is_loopback(address: str) -> bool:
    """127.0.0.1 and its kind, ::1, localhost."""
    number = number_of(address)
    return address == "localhost" if number is None else number.is_loopback


def is_documentation(address: str) -> bool:
    """An address that examples have, and no machine (RFC 5737, RFC 3849)."""
    number = number_of(address)
    return number is not None and any(number in net for net in DOCUMENTATION if net.version == number.version)


def malformed(address: str) -> str | None:
    """Half a sentence on an address that is neither an IP address nor a host name; None for one that is."""
    if number_of(address) is not None:
        return None
    if ":" in address:
        return "should be an IPv6 address where it has a colon; ports have keys of their own"
    if _NUMERIC.fullmatch(address):
        return "should be an IPv4 address, four numbers from 0 to 255, where it ends in a number"
    return None
