"""HTTP below the routes: servers, connections, readiness and requests in flight."""
