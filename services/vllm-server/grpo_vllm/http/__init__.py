"""HTTP servers that drain and keep connections open, and the gate that holds requests."""
