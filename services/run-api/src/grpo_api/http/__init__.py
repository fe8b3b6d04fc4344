"""HTTP itself: server, middleware, bodies, errors, OpenAPI. Nothing of runs or Redis."""
