"""What a training leaves in its output folder: checkpoints, their checksums, files by name, and who may write."""
