"""`python -m perfscope` is the command `perfscope`."""

from perfscope.cli.main import start

start()
