"""`resume-train`: a driver that trains on MindSpore and goes on exactly where it was (docs/training.md)."""
