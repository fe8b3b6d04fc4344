"""HTTP layer of run-api: server, middleware, request bodies, errors and OpenAPI."""
