"""Measurements of mmrpc beside its peers and the best hand-written code for the same work."""
