"""The key (`--api-key`, VLLM_API_KEY) that vLLM asks for on its own routes, asked for on ours."""

from __future__ import annotations

from pydantic import SecretStr

from grpo_core.security.asgi import App
from grpo_core.security.bearer_token import BearerTokenGuard

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/load", "/version", "/healthz", "/readyz"})
"""For probes and monitors, as vLLM leaves them."""


def require_api_key(app: App, key: SecretStr | None) -> BearerTokenGuard:
    """Args: key: None lets every request through."""
    # A browser asks with OPTIONS, and without the key, whether it may ask.
    return BearerTokenGuard(app, key, OPEN_PATHS, {"OPTIONS"}, credential="API key")
