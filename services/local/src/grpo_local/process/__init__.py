"""Processes: started, probed, measured, ended. Nothing about what a service does or is told,
except for Redis.
"""
