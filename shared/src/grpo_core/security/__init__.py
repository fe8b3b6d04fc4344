"""Which requests a server answers: tokens, and requests of the same site. Plain ASGI alone."""
