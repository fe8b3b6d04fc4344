"""How new weights reach the inference server: one interface, one class for each mode."""
