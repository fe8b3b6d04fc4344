"""HTTP below the routes: servers, connections, readiness, requests in flight. No routes."""
