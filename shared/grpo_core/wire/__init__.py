"""Records that services send to each other, and the special values inside them.

The layout is that of Atropos 0.4.0, so its environments and trainers work unchanged.
"""
