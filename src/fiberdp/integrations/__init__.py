"""Other libraries' training loops, with this library's gate, methods, ledger and receipt inside.

Each ends with the epsilon, the receipt and the numbers of the plain path, `plan.private(…)`.  Nothing of the library imports them.
"""
