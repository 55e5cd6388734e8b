"""Starts RANKS processes of a script as torchrun would, without the seconds that importing torch takes it."""

import os
import socket
import subprocess
import sys

ranks, script = int(sys.argv[1]), sys.argv[2:]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
processes = []
for rank in range(ranks):
    variables = {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
    processes.append(subprocess.Popen([sys.executable, *script], env={**os.environ, **variables}))
codes = [process.wait() for process in processes]
sys.exit(max(codes, key=abs))
