"""Recording inside the frameworks that people train with: one module each, imported when it is used.

Importing memtrace imports none of them, and importing one of them imports no framework but its own.
"""
