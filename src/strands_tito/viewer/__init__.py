"""The HTML viewer: `tito view`, offline pages, and the notebook display of ledgers.

A page consists of a stylesheet, a script and JSON data, which the script inserts as text only. Content of a rollout
never becomes markup, and the content security policy allows no other script.
"""
