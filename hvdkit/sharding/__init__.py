"""Who owns which rows and columns of a sharded variable, and the exchange that looks up rows of other ranks.

Shapes, placements and seeds go in; variables with this rank's rows, and lookups that are differentiable across ranks,
come out. Start with ``partition.py`` (from rows to ranks, pure arithmetic) and ``partitioned_variable.py`` (a sharded
variable).

Tables: ``table.py`` is the user's description, ``plan.py`` chooses placements, ``layout.py`` stacks tables in variables
and ``keys.py`` numbers their rows. ``initial.py`` and ``hashing.py`` compute initial values that do not depend on the
number of ranks. ``vocabulary.py`` maps arbitrary ids to rows, with eviction.

Lookups: ``id_checks.py`` detects invalid ids, and ``routing.py`` exchanges ids and rows.

Variables: ``shards.py`` registers those that differ between ranks or have their own optimizer, and ``variables.py``
broadcasts and compares all others.
"""
