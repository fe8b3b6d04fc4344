"""The tiny model of the demos, tests and benchmarks. No product code imports it."""
