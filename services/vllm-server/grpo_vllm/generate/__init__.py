"""`POST /generate`: checks a request, runs it in the engine and builds the answer."""
