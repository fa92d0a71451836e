"""``python -m mmrpc.cli``."""

from mmrpc.cli import app

app(prog_name="mmrpc")
