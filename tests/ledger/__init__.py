"""The ledger: what the verifier answers to about 300 fixed queries, and every number on the way, as digests.

A change that is to change nothing is compared with the commit before it, on the same machine:

    python -m tests.ledger --against main          # the digests of that commit, then those of the working tree
    python -m tests.ledger --write old.json        # the same in two steps: in the old tree,
    python -m tests.ledger --compare old.json      # then in the new one
    python -m tests.ledger --compare old.json --only cifar_cnn --kinds trees

``--compare`` and ``--against`` print what differs, by kind, and exit with status 1 if anything does. The kinds are

* ``bounds``: the intervals, pre-activations and output rows of the relaxations of ``ibp``, ``crown`` and
  ``alpha-crown``, in float64 and with coefficients in float32, and those of zonotopes;
* ``folded``: the system of inputs and unstable neurons that branch and bound makes of a query, its rows and errors;
* ``trees``: the sequence of splits and proven bounds of every tree, and of boxes for ``split``;
* ``verdicts``: of ``crown``, ``alpha-crown``, ``bab``, ``split`` and ``auto``;
* ``numbers``: margins, bit for bit, witnesses, numbers of sub-problems, and the verdict's method and reason;
* ``certificates``: what they hold, unpacked, and whether the checker accepts them;
* ``weights``: of five short trainings and one hardening.

Nothing depends on how fast the machine is: methods are charged for their work (``meter``) in place of time. Bits do
depend on the processor and the versions of libraries, so that digests are compared on one machine only. Verdicts and
accepted certificates are the same everywhere; ``verdicts.json`` has those of all queries that need no data set, and
``test_ledger.py`` holds a part of them against each change (``--verdicts`` writes the file again).
"""
