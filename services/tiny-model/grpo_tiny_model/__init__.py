"""The tiny model for demos, tests and benchmarks. No product code imports it."""
