"""Grades of answers."""
