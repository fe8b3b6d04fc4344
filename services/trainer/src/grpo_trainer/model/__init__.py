"""The policy: how it is loaded, and how its log-probabilities are computed. No update, no check
against the server.
"""
