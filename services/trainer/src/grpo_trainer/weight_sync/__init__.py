"""How new weights reach the inference server: one interface, one object per mode. No loss."""
