"""What carries packets between homes: a router's translation of addresses, and a private network.

    tunnels.py nat --to wan0                                # a router's
    tunnels.py hub --address 10.9.0.1 --port 51820          # the private network, at a public address
    tunnels.py spoke --address 10.9.0.2 --hub 198.51.100.1 --port 51820

Each reads and writes whole packets at an interface of its own, ``tun0``. It stands for what a router and WireGuard with
one peer at a public address do, without secrets: a spoke sends datagrams to the hub, which learns from them where the
spoke is, and hands packets on between spokes.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import select
import socket
import struct
import subprocess
from typing import NamedTuple

INTERFACE = "tun0"
_INSIDE = 1400  # largest packet: with the headers of the datagram that it travels in less than 1500
_OPEN, _FLAGS = 0x400454CA, 0x1001  # TUNSETIFF; IFF_TUN | IFF_NO_PI
_UDP = 17
_ALIVE_S = 0.5  # between two messages that keep a router's entry for a spoke
_LARGEST = 65536


class Flow(NamedTuple):
    """Who of a home talks to whom outside."""

    source: bytes
    source_port: int
    target: bytes
    target_port: int


def open_tun(address: str | None, mtu: int = 1500) -> int:
    """The interface, up; packets are read and written as they are."""
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, _OPEN, struct.pack("16sH22x", INTERFACE.encode(), _FLAGS))
    if address is not None:
        subprocess.run(["ip", "address", "add", f"{address}/24", "dev", INTERFACE], check=True)
    subprocess.run(["ip", "link", "set", INTERFACE, "up", "mtu", str(mtu)], check=True)
    return tun


def translate(outside: str) -> None:
    """A router's: each flow of a home has a port of the router's own, which takes answers from its target only."""
    tun = open_tun(None)
    sockets: dict[Flow, socket.socket] = {}
    flows: dict[int, Flow] = {}
    while True:
        for ready in _readable(tun, *flows):
            if ready == tun:
                packet = os.read(tun, _LARGEST)
                if packet[0] >> 4 != 4 or packet[9] != _UDP:
                    continue  # nothing else leaves a home here
                header = 4 * (packet[0] & 15)
                flow = Flow(packet[12:16], _port(packet, header), packet[16:20], _port(packet, header + 2))
                if flow not in sockets:
                    sockets[flow] = _bound_to(outside, flow)
                    flows[sockets[flow].fileno()] = flow
                sockets[flow].send(packet[header + 8 :])
            else:
                flow = flows[ready]
                os.write(tun, _datagram(flow, sockets[flow].recv(_LARGEST)))


def _readable(*descriptors: int, timeout: float | None = None) -> list[int]:
    return select.select(descriptors, [], [], timeout)[0]


def _port(packet: bytes, at: int) -> int:
    return int.from_bytes(packet[at : at + 2], "big")


def _bound_to(device: str, flow: Flow) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
    made.connect((socket.inet_ntoa(flow.target), flow.target_port))
    return made


def _datagram(flow: Flow, payload: bytes) -> bytes:
    """An answer to a flow, as a packet."""
    udp = struct.pack("!HHHH", flow.target_port, flow.source_port, 8 + len(payload), 0)
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(udp) + len(payload), 0, 0, 64, _UDP, 0)
    words = sum(struct.unpack("!10H", head + flow.target + flow.source))
    while words >> 16:
        words = (words & 0xFFFF) + (words >> 16)
    return head[:10] + struct.pack("!H", ~words & 0xFFFF) + flow.target + flow.source + udp + payload


def serve(address: str, port: int) -> None:
    """The hub of a private network."""
    tun, own = open_tun(address, _INSIDE), socket.inet_aton(address)
    outside = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    outside.bind(("0.0.0.0", port))
    places: dict[bytes, tuple[str, int]] = {}
    while True:
        for ready in _readable(tun, outside.fileno()):
            if ready == tun:
                packet = os.read(tun, _LARGEST)
            else:
                packet, place = outside.recvfrom(_LARGEST)
                places[packet[12:16] or packet] = place
            target = packet[16:20]
            if target == own:
                os.write(tun, packet)
            elif target in places:
                outside.sendto(packet, places[target])


def reach(address: str, hub: str, port: int) -> None:
    """A member of a private network; what it sends goes to the hub."""
    tun, outside = open_tun(address, _INSIDE), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    outside.connect((hub, port))
    while True:
        ready = _readable(tun, outside.fileno(), timeout=_ALIVE_S)
        if not ready:
            outside.send(socket.inet_aton(address))
        if tun in ready:
            outside.send(os.read(tun, _LARGEST))
        if outside.fileno() in ready:
            os.write(tun, outside.recv(_LARGEST))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=("nat", "hub", "spoke"))
    for name in ("to", "address", "hub"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--port", type=int, default=51820)
    options = parser.parse_args()
    if options.role == "nat":
        translate(options.to)
    elif options.role == "hub":
        serve(options.address, options.port)
    else:
        reach(options.address, options.hub, options.port)


if __name__ == "__main__":
    main()
