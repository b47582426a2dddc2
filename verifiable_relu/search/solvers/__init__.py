"""Methods that hand a query to a solver: z3 (``smt``, ``smt-exact``), HiGHS (``milp``), Marabou, and auto_LiRPA.

Each is a frozen dataclass with a name and ``decide`` (``search.question.CompleteMethod``). Solvers run in
processes of their own, and are given plain data.
"""
