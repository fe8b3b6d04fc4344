"""How a step changes the masters: update rules, the masters' data type, rounding."""
