"""HTTP below the routes: sockets, connections, readiness, requests in flight."""
