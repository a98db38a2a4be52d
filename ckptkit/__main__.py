"""Run the command line as `python -m ckptkit`."""

from ckptkit.cli import main

main()
