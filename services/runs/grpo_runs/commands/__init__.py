"""One module per command: the steps of the command, in order."""
