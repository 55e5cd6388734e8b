"""`python -m perfscope` is the command `perfscope`."""

from perfscope.cli.main import main

main(prog_name="perfscope")
