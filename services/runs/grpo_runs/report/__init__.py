"""Tables, files and plots with the results of runs."""
