"""What a run saves (checkpoints and exported models), and how it resumes."""
