"""Tests of mmrpc. A package, so that no other `tests` on the path can take its name."""
