"""Does the server serve the weights that the trainer holds, and did they sample the rollouts? Only
measures, and refuses; changes no weight.
"""
