"""The parts of an objective, each a pure function, and the recipes that combine them."""
