"""Hostile input by seed: files, engines' answers and agents' messages. `tools/fuzz.py` runs it, in child processes.

A class is a module with a `Target`: it takes random numbers, makes one hostile input, and returns whether the package
refused or accepted it. What it must not do is a `Finding`; an exception that is not documented is one too.
"""
