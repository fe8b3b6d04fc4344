"""HTTP handlers of run-api, one module per noun. The handlers issue no Redis commands."""
