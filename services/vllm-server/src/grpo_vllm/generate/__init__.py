"""`POST /generate`: checked request, run in the engine, answer. No routes, no weights."""
