"""Processes of this package: limits of time and memory, kills, shares of work, and executors of tasks.

A library in C or C++ cannot be interrupted from Python, may crash, and may use up all memory. Risky calls of one are
made in another process, which alone takes the consequences: in a copy of this one (``forks``), which has everything
prepared and costs milliseconds, or in a fresh one that answers call after call (``workers``). Executors perform
tasks in several of these, or on a Dask cluster. No process outlives the one that has started it, however that ends.
"""
