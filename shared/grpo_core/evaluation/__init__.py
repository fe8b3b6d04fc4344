"""Results of an evaluation: estimates with intervals, records, files and tables."""
