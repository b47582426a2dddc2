"""Processes of this package: limits of time and memory, kills, shares of work, and executors of tasks.

A library in C or C++ cannot be interrupted from Python, may crash, and may use up all memory. Risky calls of one are
made in another process, which alone takes the consequences:

- ``forks``: copies of this process, which begin with everything that it has prepared and cost milliseconds;
- ``workers``: fresh Python processes that answer call after call;
- ``executors`` and ``cluster``: tasks for several workers, of this machine or of a Dask cluster;
- ``memory``: how much memory a process has, and may have.

No process outlives the one that has started it, however that ends.
"""
