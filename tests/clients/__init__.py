"""The real frameworks as clients: scripts that run in child processes, and what tests need to run them."""
