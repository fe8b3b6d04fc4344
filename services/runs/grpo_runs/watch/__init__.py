"""Shows runs while they train: reads their files and asks run-api."""
