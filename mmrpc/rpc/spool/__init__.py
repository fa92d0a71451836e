"""Large plain tensors between processes of one host: copied once, into memory both keep mapped.

TensorPipe copies a tensor several times. Here the sender copies it into a *slot*, a piece of
shared memory that it has used before, and sends the slot's name; the receiver has the slot
mapped from the last time and gets a tensor on it, which is its own: nobody writes to the slot
until that tensor is gone. So values go by value, as ever, only faster.

- `slots`: the sender's slots, and whose turn it is with each.
- `control`: the words by which both sides tell.
- `received`: the receiver's side.
- `sweeper`: when both sides give back what is not used.
- `peers`: which workers are processes of this host.
- `policy`: what goes this way.
"""
