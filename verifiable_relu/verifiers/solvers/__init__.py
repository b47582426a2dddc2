"""Solvers' libraries, each called in a process of its own.

``process`` starts, limits and ends such processes. A module of a library has what is asked and answered, as plain data,
and the function that calls it, which its process alone does: the library is imported nowhere else.
"""
