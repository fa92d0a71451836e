"""One file starts the cluster: one agent per node, its workers, their logs, and a clean end.

`launcher` decides, `agent` does it on each node, `gang` holds a node's processes, and `channel`
is the pair of streams between launcher and agent: pipes of a child, of ``ssh`` or of ``srun``,
or a socket. Whoever loses its channel ends what it started.
"""
