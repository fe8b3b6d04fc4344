"""`POST /generate`: request, run, answer."""
