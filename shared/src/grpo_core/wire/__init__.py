"""Records that travel between services, and the sentinels inside them. Pure: no client, no Redis.

The layout is that of Atropos 0.4.0, so its environments and trainers work unchanged.
"""
