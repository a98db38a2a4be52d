"""Run one checkpoint in one framework, in a process of its own: `python -m ckptkit.verification.runners.torch JOB`.

Nothing here may know the mapping tables (a test walks the imports): a network that took its weights by way of a table
would forgive the table's errors.
"""
