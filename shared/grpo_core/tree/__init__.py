"""Every option of a run, once: by subject, and the commands that read them."""
