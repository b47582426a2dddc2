"""Solvers' libraries, each called in a process of its own.

``process`` starts, limits and ends such processes; ``serve`` is what they run. For each library there are two modules:
``highs`` and ``z3`` hold what is asked and answered, as plain data, and know nothing of the library; ``highs_process``
and ``z3_process`` call it and are imported by its process alone.
"""
