"""Starts RANKS processes of a script as torchrun would, without the seconds that importing torch takes it.

``MASTER_PORT`` is the port on which they meet.
"""

import os
import subprocess
import sys

ranks, script = int(sys.argv[1]), sys.argv[2:]
shared = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
processes = []
for rank in range(ranks):
    variables = {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
    processes.append(subprocess.Popen([sys.executable, *script], env={**os.environ, **variables}))
codes = [process.wait() for process in processes]
sys.exit(max(codes, key=abs))
