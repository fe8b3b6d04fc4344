"""HTTP below the routes: the server, request bodies, answers, middleware. No Redis."""
