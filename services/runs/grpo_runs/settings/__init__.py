"""Options of the commands, and checks of them before a start."""
