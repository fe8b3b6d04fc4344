"""The server's own HTTP routes. Handlers only parse, call and reply."""
