"""Grades answers: finds the stated result, compares it with the right one, computes reward parts.

Nothing here knows of tasks. Tasks choose the forms of results and the reward parts.
"""
