"""From gradients to updated masters: schedule, update rules, rounding. Pure: no I/O, no client."""
