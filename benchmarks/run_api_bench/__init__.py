"""run-api beside the API server of atroposlib: load, measurements, report."""
