"""``lowbit lighthouse``, which elastic runs need."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from typing import Annotated

import typer


def lighthouse(
    bind: Annotated[str, typer.Option(help="Address and port to listen on.")] = "[::]:29510",
    min_replicas: Annotated[int, typer.Option(min=1, help="With fewer, all replicas wait.")] = 1,
    heartbeat_timeout: Annotated[
        float, typer.Option(min=0.3, help="Seconds without a heartbeat after which a replica is lost.")
    ] = 2.0,
    join_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that replicas wait in a round for a slower live one.")
    ] = 600.0,
) -> None:
    """Run torchft's lighthouse until it is interrupted. Its page shows the replicas.

    It keeps no important state: if it is lost, replicas wait, and continue once it has been started again. Give each
    run its own lighthouse. It does not authenticate anyone who reaches the port, so keep it in a private network.
    """
    from lowbit_strategy.elastic.lighthouse import start_lighthouse

    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    os.environ.setdefault("RUST_LOG", "error")
    try:
        server = start_lighthouse(
            bind, min_replicas=min_replicas, join_timeout=join_timeout, heartbeat_timeout=heartbeat_timeout
        )
    except (ImportError, RuntimeError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    port = server.address().rpartition(":")[2]
    typer.echo(f"lighthouse at http://{socket.gethostname()}:{port}, which has a page for browsers")
    while not ended.wait(0.5):
        pass
    server.shutdown()
