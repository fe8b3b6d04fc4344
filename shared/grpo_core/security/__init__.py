"""ASGI middleware that rejects requests without a token or from other web sites."""
