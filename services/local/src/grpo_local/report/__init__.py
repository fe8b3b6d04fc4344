"""The figures of runs, as tables, files and plots. Starts nothing."""
