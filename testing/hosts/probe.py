"""What a link gives without any of our programs: a byte to the other host and back, messages as steps send them, one
TCP stream.

Run on two hosts: ``probe.py serve ADDRESS``, then ``probe.py ask ADDRESS SECONDS``, which prints JSON.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import time

_PORT = 7213
_PINGS = 5
_MESSAGES, _MESSAGE_NBYTES, _SILENCE_S = (
    6,
    1_200_000,
    1.0,
)  # 4 hosts, 9.6 million elements at 4 bits; a step between two
_CHUNK = 1 << 18


def serve(address: str) -> None:
    with socket.create_server((address, _PORT)) as server:
        connection, _ = server.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(_PINGS):
                connection.sendall(connection.recv(1))
            for _ in range(_MESSAGES):
                left = _MESSAGE_NBYTES
                while left:
                    left -= len(connection.recv(min(left, _CHUNK)))
                connection.sendall(b".")
            arrived, start, room = [], time.perf_counter(), bytearray(_CHUNK)
            while length := connection.recv_into(room):
                arrived.append((time.perf_counter() - start, length))
            connection.sendall(json.dumps(_throughput(arrived)).encode())


def _throughput(arrived: list[tuple[float, int]]) -> dict[str, float]:
    """Bits per second of the whole stream, and of its second half, when it has found its speed."""
    end = arrived[-1][0]
    late = sum(length for at, length in arrived if at > end / 2)
    return {"stream_bps": 8 * sum(n for _, n in arrived) / end, "settled_bps": 8 * late / (end / 2)}


def ask(address: str, seconds: float) -> dict[str, float]:
    for _ in range(200):
        try:
            connection = socket.create_connection((address, _PORT), timeout=30)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(_PINGS):
            start = time.perf_counter()
            connection.sendall(b".")
            connection.recv(1)
            times.append(time.perf_counter() - start)
        messages = []
        for _ in range(_MESSAGES):
            time.sleep(_SILENCE_S)
            start = time.perf_counter()
            connection.sendall(bytes(_MESSAGE_NBYTES))
            connection.recv(1)
            messages.append(time.perf_counter() - start)
        chunk, end = bytes(_CHUNK), time.perf_counter() + seconds
        while time.perf_counter() < end:
            connection.sendall(chunk)
        connection.shutdown(socket.SHUT_WR)
        measured: dict[str, float] = json.loads(connection.recv(4096))
    return {"ping_s": statistics.median(times), "message_s": statistics.median(messages[2:]), **measured}


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        print(json.dumps(ask(sys.argv[2], float(sys.argv[3]))))
