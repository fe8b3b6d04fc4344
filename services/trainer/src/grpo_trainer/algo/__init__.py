"""Advantages, the loss, gradients over micro-batches, the table of trained tokens. Pure: no I/O, no
client, no knowledge of where batches come from or weights go.
"""
