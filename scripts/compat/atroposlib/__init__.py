"""The one module of this name that the archived documents run. It is not installed."""
