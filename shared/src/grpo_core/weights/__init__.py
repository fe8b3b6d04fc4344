"""What trainer and inference server say to each other about weights: files, memory, commands."""
