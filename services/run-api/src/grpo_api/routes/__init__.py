"""HTTP handlers of run-api, one module per noun. They issue no Redis commands."""
