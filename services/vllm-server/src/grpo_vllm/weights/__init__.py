"""The weights that are served: where they lie, who may write them, which version they are."""
