"""The ledger: verdicts, margins and accepted certificates of about 450 fixed questions, and the CPU time they take.

Two commits answer alike when the ledger of the one, compared with the ledger of the other, names no difference:

    python -m tests.ledger --against main          # the ledger of that commit, then of the working tree
    python -m tests.ledger --write old.json        # the same in two steps: in the old tree,
    python -m tests.ledger --compare old.json      # then in the new one
    python -m tests.ledger --compare old.json --only acasxu

Questions are files: the properties of ``specs/``, those of random networks (``queries``), and instances of the
verification competition from the folder that ``VERIFIABLE_RELU_DATA`` names. Answers are the columns of ``results.csv``
that ``certify`` writes, so that the ledger depends on no inner part of the package. ``--compare`` exits with status 1
if a verdict, a margin of CROWN (relative to 1e-6) or the acceptance of a certificate differs. It prints CPU times next
to each other, and leaves them for the reader to judge.

``verdicts.json`` has the verdicts of the questions that need no data set; ``test_ledger.py`` asks a part of them in
the gate. ``--verdicts`` writes the file again.
"""
