"""The environment's inference servers: waits until they are ready and distributes requests."""
