"""What the stack does on one GPU, beside bare vLLM and beside what the hardware allows."""
