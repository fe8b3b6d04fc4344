"""Answers of maths: finds the result that an answer states, and compares it with the right one.

Nothing here knows of tasks, which choose the forms of results.
"""
