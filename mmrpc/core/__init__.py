"""One machine: bytes in files or shared memory, as torch tensors. Knows no node, RPC or config."""
