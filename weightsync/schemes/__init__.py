"""One file or folder for each scheme. Each implements weightsync.transport and nothing else."""
