"""From a prompt to a scored group in the queue, and its counters. No decision on the pace."""
