"""The functions behind the commands: the public Python API, one file a command.

Each takes plain arguments, prints nothing, and returns a `Report`; errors are `CkptkitError`s. `source.py` opens
what the user names; `choose.py` settles family, dialects and variants. Import them from `ckptkit`.
"""
