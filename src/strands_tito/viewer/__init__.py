"""Rollouts in a browser: `tito view`, one offline file, and what a notebook shows of a ledger.

A page is a stylesheet, a script and its data, which is JSON that the script only ever shows as text. Nothing of a
rollout becomes markup, and the page's content security policy runs no other script.
"""
