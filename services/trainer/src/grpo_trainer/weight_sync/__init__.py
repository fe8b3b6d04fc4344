"""How new weights reach the inference server: one module per mode, one interface."""
