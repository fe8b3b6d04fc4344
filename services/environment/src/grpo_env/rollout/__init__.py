"""From a prompt to a scored group."""
