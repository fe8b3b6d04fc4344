"""What a run saves, and how it resumes. Nothing of how weights are served."""
